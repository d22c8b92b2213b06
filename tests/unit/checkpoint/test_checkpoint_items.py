"""Items say what they are, and a state that does not fit is refused before anything is changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import Value, same

from isthmus.checkpoint import Checkpointer, Item
from isthmus.errors import CheckpointError


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"value": 3}, "needs state_dict"),
        ({"value": Value(), "scope": "global"}, "scope is 'global'"),
        ({"value": Value(), "scope": "per_rank", "on_resize": "guess"}, "on_resize is 'guess'"),
        ({"value": Value(), "on_resize": "reset"}, "on_resize is for per-rank items"),
        ({"value": Value(), "scope": "per_rank", "on_resize": "rederive"}, "needs rederive"),
    ],
)
def test_a_wrong_declaration(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Item(**arguments)


@pytest.mark.parametrize("name", ["", "a/b", "__metadata__", "é", "a b", "1"])
def test_a_name_that_cannot_be_used(tmp_path: Path, name: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    for attempt in (
        lambda: checkpointer.save(1, {name: Item(Value())}),
        lambda: checkpointer.load({name: Item(Value())}),
    ):
        with pytest.raises(ValueError, match="item name"):
            attempt()


def test_wrong_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last is 0"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="step is -1"):
        Checkpointer(tmp_path).save(-1, {})


def test_other_items_than_were_saved(tmp_path: Path) -> None:
    Checkpointer(tmp_path).save(1, {"a": Item(Value(1)), "b": Item(Value(2))})
    for items in (
        {"a": Item(Value())},
        {"a": Item(Value()), "b": Item(Value()), "c": Item(Value())},
        {"a": Item(Value()), "b": Item(Value(), scope="per_rank")},
    ):
        with pytest.raises(CheckpointError, match=r"holds a \(replicated\), b \(replicated\)"):
            Checkpointer(tmp_path).load(items)
        assert all(item.value.state_dict() is None for item in items.values())


def model(width: int = 3, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, width, bias=bias, dtype=dtype))


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (model(width=5), r"0.weight is float32 \[5, 4\], in the checkpoint float32 \[3, 4\]"),
        (model(dtype=torch.bfloat16), r"0.weight is bfloat16 \[3, 4\], in the checkpoint float32"),
        (model(bias=False), "0.bias is not in the model"),
        (torch.nn.Sequential(model(), model()), "0.0.weight is not in the checkpoint"),
    ],
)
def test_a_model_that_does_not_fit_is_left_alone(tmp_path: Path, other: Any, error: str) -> None:
    Checkpointer(tmp_path).save(1, {"first": Item(Value(1)), "model": Item(model())})
    before = copy.deepcopy(other.state_dict())
    first = Value()
    with pytest.raises(CheckpointError, match=error) as caught:
        Checkpointer(tmp_path).load({"first": Item(first), "model": Item(other)})
    assert "does not fit 'model'" in caught.value.message
    assert first.state is None
    assert same(other.state_dict(), before)
    assert (tmp_path / "step-00000001").is_dir()


def test_an_optimizer_that_does_not_fit(tmp_path: Path) -> None:
    one, two = model(), model(bias=False)
    saved = torch.optim.AdamW(one.parameters())
    other = torch.optim.AdamW(two.parameters())
    Checkpointer(tmp_path).save(1, {"optimizer": Item(saved)})
    with pytest.raises(CheckpointError, match=r"by group are \[1\], in the checkpoint \[2\]"):
        Checkpointer(tmp_path).load({"optimizer": Item(other)})


def test_a_value_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Picky(Value):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("epoch")

    Checkpointer(tmp_path).save(1, {"schedule": Item(Value(1))})
    with pytest.raises(CheckpointError, match=r"'schedule' refused the state .*epoch") as caught:
        Checkpointer(tmp_path).load({"schedule": Item(Picky())})
    assert "do not go on" in caught.value.hint
