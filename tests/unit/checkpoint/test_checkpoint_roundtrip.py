"""What goes in comes out: every type of state, exactly, and everything else is refused by name."""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from checkpoint_states import Value, raw, same
from hypothesis import given
from hypothesis import strategies as st

from isthmus.checkpoint import Checkpointer, Item
from isthmus.checkpoint.blob import SAFETENSORS_CODES, TENSOR_DTYPES
from isthmus.checkpoint.files import read_blobs
from isthmus.checkpoint.manifest import unseal
from isthmus.checkpoint.tree import Packer, decode
from isthmus.errors import CheckpointError


def through_disk(directory: Path, state: Any) -> Any:
    loaded = Value()
    Checkpointer(directory).save(1, {"it": Item(Value(state))})
    info = Checkpointer(directory).load({"it": Item(loaded)})
    assert info is not None
    assert info.step == 1
    return loaded.state


def through_json(state: Any) -> Any:
    packer = Packer()
    tree = msgspec.json.decode(msgspec.json.encode(packer.pack("it", state)))
    return decode(tree, {name: blob.value for name, blob in packer.blobs.items()})


def samples_of(dtype: torch.dtype) -> list[torch.Tensor]:
    size = 24
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (size * dtype.itemsize,))
    flat = bits.to(torch.uint8).view(dtype)
    return [
        flat,
        flat.reshape(2, 3, 4),
        flat.reshape(4, 6).t(),
        flat[::3],
        flat[5].clone().reshape(()),
        flat[:0],
        flat[:0].reshape(3, 0, 2),
        flat[:1].expand(5),
    ]


@pytest.mark.parametrize("dtype", TENSOR_DTYPES.values(), ids=str)
def test_every_tensor_type_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    state = samples_of(dtype)
    assert same(through_disk(tmp_path, state), state)


@pytest.mark.parametrize(
    "code", ["?", "b", "B", "<i2", ">i2", "<u4", "<i8", "<f2", "<f4", ">f8", "<c8", "<c16"]
)
def test_every_array_type_keeps_its_bits(tmp_path: Path, code: str) -> None:
    dtype = np.dtype(code)
    whole = np.arange(24).astype(dtype).reshape(4, 6)
    state = [whole, whole.T, whole[::2, 1:], whole[:0], np.array(whole[1, 1]), whole[1, 1]]
    assert same(through_disk(tmp_path, state), state)


def test_text_and_time_arrays(tmp_path: Path) -> None:
    state = [
        np.array(["a", "ß", "\U0001f600x"]),
        np.array([b"a", b"bc"]),
        np.array(["2026-01-01", "NaT"], dtype="M8[ns]"),
        np.array([1, 2], dtype="m8[7s]"),
        np.datetime64("2026-01-01"),
        np.float32(1.5),
        np.bool_(True),
    ]
    assert same(through_disk(tmp_path, state), state)


def test_random_states(tmp_path: Path) -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(7).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    loaded = through_disk(tmp_path, state)
    assert same(loaded, state)
    expected = random.random()
    random.setstate(loaded["python"])
    assert random.random() == expected


def test_plain_values(tmp_path: Path) -> None:
    state = {
        "none": None,
        "bool": [True, False],
        "int": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**20000],
        "float": [0.0, -0.0, 1.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        "str": ["", 'ß\0\n"\\', "\ud800", "\U0001f600"],
        "bytes": [b"", b"\0\xff" * 1000],
        "complex": [1 - 0j, complex(math.nan, -0.0)],
        "keys": {0: "int", "0": "str", (1, "a"): "tuple", None: 1, b"k": 2, 1.5: 3, "\udfff": 4},
        "empty": [[], (), {}, OrderedDict()],
        "nested": ([{"a": ([],)}], ((),)),
    }
    assert same(through_disk(tmp_path, state), state)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))
    | st.binary(max_size=20)
    | st.complex_numbers()
)
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each)
        | st.lists(each).map(tuple)
        | st.dictionaries(KEYS, each)
        | st.dictionaries(st.text(), each).map(OrderedDict)
    ),
    max_leaves=30,
)


@given(TREES)
def test_any_tree_survives_json(state: Any) -> None:
    assert same(through_json(state), state)


def test_colliding_names_stay_apart(tmp_path: Path) -> None:
    state = {0: torch.tensor(1), "0": torch.tensor(2), "a": {"b": torch.tensor(3)}}
    state["a/b"] = torch.tensor(4)
    assert same(through_disk(tmp_path, state), state)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer, 1)
    Checkpointer(tmp_path).save(1, {"model": Item(model), "optimizer": Item(optimizer)})
    saved_state = copy.deepcopy(model.state_dict())
    step(model, optimizer, 2)

    again, optimizer_again = model_and_optimizer()
    Checkpointer(tmp_path).load({"model": Item(again), "optimizer": Item(optimizer_again)})
    assert same(again.state_dict(), saved_state)
    step(again, optimizer_again, 2)
    assert same(again.state_dict(), model.state_dict())
    assert same(optimizer_again.state_dict(), optimizer.state_dict())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(50, 20)
    other = weight.clone()
    state = {"embedding": weight, "head": weight.view(50, 20), "view": weight.t(), "other": other}
    loaded = through_disk(tmp_path, state)
    assert same(loaded, state)
    assert loaded["embedding"] is loaded["head"]
    assert loaded["embedding"] is not loaded["other"]
    assert (tmp_path / "step-00000001/shared-00000.safetensors").stat().st_size < 3.2 * 4000


def test_parameters_are_stored_as_tensors(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    assert same(through_disk(tmp_path, [parameter]), [parameter.detach()])


def test_conjugate_and_negative_views(tmp_path: Path) -> None:
    values = torch.randn(4, dtype=torch.complex64)
    state = [values, values.conj(), values.conj().imag]
    loaded = through_disk(tmp_path, state)
    assert [each.tolist() for each in loaded] == [each.tolist() for each in state]


def test_safetensors_can_read_the_file(tmp_path: Path) -> None:
    state = {name: torch.ones(3, 2).to(getattr(torch, name)) for name in SAFETENSORS_CODES}
    state["odd"] = torch.ones(3, dtype=torch.bool)
    through_disk(tmp_path, state)
    tensors = safetensors.torch.load_file(tmp_path / "step-00000001/shared-00000.safetensors")
    assert tensors.keys() == {f"it/{name}" for name in state}
    for name, tensor in state.items():
        assert same(tensors[f"it/{name}"], tensor)


def test_safetensors_sees_bytes_where_it_lacks_the_type(tmp_path: Path) -> None:
    state = {"a": torch.ones(2, dtype=torch.complex128), "b": np.arange(3, dtype=">i4"), "c": b"xy"}
    through_disk(tmp_path, state)
    arrays = safetensors.numpy.load_file(tmp_path / "step-00000001/shared-00000.safetensors")
    assert arrays["it/a"].tobytes() == raw(state["a"])
    assert arrays["it/b"].tobytes() == state["b"].tobytes()
    assert arrays["it/c"].tobytes() == b"xy"


def test_tensors_lie_aligned(tmp_path: Path) -> None:
    state = [torch.ones(3, dtype=torch.bool), b"xyz", torch.ones(3), torch.ones(3).bfloat16()]
    through_disk(tmp_path, [*state, torch.ones(1, dtype=torch.float64)])
    path = tmp_path / "step-00000001"
    (file,) = unseal((path / "manifest.json").read_bytes()).files
    position = file.header_nbytes
    for blob in file.blobs:
        itemsize = blob.nbytes // math.prod(blob.shape)
        assert position % itemsize == 0
        position += blob.nbytes
    assert read_blobs(path, file)[1] == []


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (Point(1, 2), "Point"),
        (np.array([object()]), "ndarray of object"),
        (np.zeros(2, dtype=[("a", "i4")]), "ndarray of"),
        (np.longdouble(1), "ndarray of float128"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (random.Random(1), "Random"),
        (lambda: None, "function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named(tmp_path: Path, value: Any, kind: str) -> None:
    state = {"outer": [0, {"inner": value}]}
    with pytest.raises(CheckpointError, match=f"it/outer/1/inner: a .*{kind}") as caught:
        through_disk(tmp_path, state)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        through_disk(tmp_path, state)


def test_deep_states(tmp_path: Path) -> None:
    state: Any = "x"
    for _ in range(30):
        state = ([{1: state}],)
    assert same(through_disk(tmp_path, state), state)
