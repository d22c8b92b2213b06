"""Which rank a process is, from the variables of each launcher."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.elastic.environment import ATTEMPT, RankEnvironment, detect
from isthmus.elastic.slurm import expand_nodelist, parse_tasks_per_node
from isthmus.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-03,7]",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_set_is_nobody() -> None:
    assert detect({}) is None
    assert detect({"MASTER_ADDR": "left over from a notebook"}) is None


def test_torchrun() -> None:
    found = detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert found == RankEnvironment(
        rank=3,
        world_size=8,
        local_rank=1,
        local_world_size=2,
        master_addr="node1",
        master_port=29500,
        launcher="torchrun",
        attempt="torchrun-abc-29500-2",
    )
    assert not found.on_one_machine


def test_own_launcher_is_told_by_its_mark() -> None:
    found = detect(TORCHRUN | {ATTEMPT: "this one"})
    assert found is not None
    assert (found.launcher, found.attempt) == ("isthmus", "this one")


@given(st.sets(st.sampled_from(sorted(TORCHRUN)), min_size=1, max_size=5))
def test_half_set_variables_are_an_error_that_names_the_missing(missing: set[str]) -> None:
    environ = without(TORCHRUN, *missing)
    if not environ.keys() - {"MASTER_ADDR", "MASTER_PORT"}:
        assert detect(environ) is None
        return
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    said = caught.value.message.split(" missing")[0]
    assert {name for name in TORCHRUN if name in said.replace(",", "").split()} == missing


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "eight", "RANK is 'eight'"),
        ("RANK", "8", "rank 8 is not below world_size 8"),
        ("RANK", "-1", "rank -1 is not below"),
        ("LOCAL_RANK", "2", "local_rank 2 is not below"),
        ("LOCAL_WORLD_SIZE", "9", "9 ranks on this host but 8 in all"),
        ("MASTER_PORT", "0", "MASTER_PORT 0 is no port"),
        ("MASTER_PORT", "70000", "MASTER_PORT 70000 is no port"),
    ],
)
def test_contradictions_are_errors(name: str, value: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        detect(TORCHRUN | {name: value})


def test_slurm_step() -> None:
    found = detect(SLURM)
    assert found == RankEnvironment(
        rank=6,
        world_size=7,
        local_rank=0,
        local_world_size=1,
        master_addr="node01",
        master_port=None,
        launcher="slurm",
        attempt="slurm-77.0-0",
    )
    again = detect(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert again is not None
    assert again.attempt != found.attempt, "a requeued job must not read the old rendezvous"


def test_slurm_step_takes_the_users_master() -> None:
    found = detect(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "WORLD_SIZE": "7"})
    assert found is not None
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 1234)


def test_slurm_step_smaller_than_its_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    found = detect(SLURM | step)
    assert found is not None
    assert (found.rank, found.world_size, found.local_world_size) == (1, 2, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1"},  # salloc
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "WORLD_SIZE": "8"},  # salloc, user's export
        without(SLURM, "SLURM_STEP_ID"),  # the body of an sbatch script
        SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc with use_interactive_step
        SLURM | {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # the batch step
        SLURM | {"SLURM_NTASKS": "1"},  # srun --pty bash
    ],
)
def test_a_slurm_shell_is_no_rank(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_torchrun_inside_a_slurm_step_is_torchrun() -> None:
    found = detect(SLURM | TORCHRUN)
    assert found is not None
    assert found.launcher == "torchrun"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_half_a_slurm_step_is_an_error(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} missing"):
        detect(without(SLURM, name))


def test_slurm_tasks_that_do_not_add_up() -> None:
    with pytest.raises(LaunchError, match="do not add up to 7"):
        detect(SLURM | {"SLURM_TASKS_PER_NODE": "2(x4)"})


@given(st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_tasks_per_node_come_back(counts: list[int]) -> None:
    runs = [(value, len(list(group))) for value, group in groupby(counts)]
    text = ",".join(f"{value}(x{length})" if length > 1 else f"{value}" for value, length in runs)
    assert parse_tasks_per_node(text) == counts


@st.composite
def nodelists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A SLURM node list and the hosts it stands for."""
    items, hosts = [], []
    prefixes = st.from_regex(r"[a-z]{1,4}[0-9]?-?", fullmatch=True)
    for prefix in draw(st.lists(prefixes, min_size=1, max_size=4)):
        if draw(st.booleans()):
            items.append(prefix)
            hosts.append(prefix)
            continue
        width, ranges = draw(st.integers(1, 4)), []
        for _ in range(draw(st.integers(1, 3))):
            first, extra = draw(st.integers(0, 9)), draw(st.integers(0, 12))
            numbers = [f"{number:0{width}d}" for number in range(first, first + extra + 1)]
            ranges.append(f"{numbers[0]}-{numbers[-1]}" if extra else numbers[0])
            hosts.extend(prefix + number for number in numbers)
        items.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(items), hosts


@given(nodelists())
def test_nodelists_expand_to_their_hosts(case: tuple[str, list[str]]) -> None:
    text, hosts = case
    assert expand_nodelist(text) == hosts


def test_nodelists_with_two_brackets_and_a_suffix() -> None:
    assert expand_nodelist("r[1-2]n[08-10]-ib,gpu5") == [
        *(f"r{rack}n{node}-ib" for rack in (1, 2) for node in ("08", "09", "10")),
        "gpu5",
    ]


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-", "n1]", "n[]", "n[3-1]", "n[a-b]", "n[1,]"])
def test_broken_nodelists_are_errors(text: str) -> None:
    with pytest.raises(LaunchError, match="cannot read"):
        expand_nodelist(text)


@pytest.mark.parametrize("text", ["", "2(x", "x3", "2,,1", "-1", "2(3)"])
def test_broken_tasks_per_node_are_errors(text: str) -> None:
    with pytest.raises(LaunchError, match="cannot read"):
        parse_tasks_per_node(text)
