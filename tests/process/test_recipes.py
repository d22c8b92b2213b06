"""The recipes do what they say at their top."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from pool import RankPool

RECIPES = Path(__file__).parents[2] / "recipes"


def environment(directory: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC"))}
    return kept | {"ISTHMUS_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1"}


def loop(directory: Path, steps: int) -> dict[int, list[str]]:
    """Runs plain_loop.py under torchrun and returns what each of two ranks has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["--redirects", "3", "--log-dir", f"logs-{steps}"]  # ranks' lines may mix otherwise
    command += [str(RECIPES / "plain_loop.py"), "run", str(steps)]
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logs = {rank: next(directory.glob(f"logs-{steps}/**/{rank}/stdout.log")) for rank in (0, 1)}
    return {
        rank: [line.removeprefix(f"rank {rank}: ") for line in log.read_text().splitlines()]
        for rank, log in logs.items()
    }


def loop_once_more(rank: int, world_size: int, *, directory: str, steps: int) -> list[str]:
    """The same in a rank of the pool."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(RECIPES / "plain_loop.py"))["main"](Path(directory), steps)
    return out.getvalue().splitlines()


@pytest.mark.timeout(180)
def test_the_plain_loop_learns_goes_on_and_says_when_it_has_finished(
    ranks: RankPool, tmp_path: Path
) -> None:
    first = loop(tmp_path, 20)
    assert first[0] == first[1]
    assert losses(first[0])[1] > 5
    on = loop(tmp_path, 30)
    assert on[0] == on[1]
    assert list(losses(on[0])) == [30]
    assert losses(on[0])[30] < 3.5
    assert on[0][-1] == "finished 30 steps, sent 40,678,780 bytes"
    again = ranks.run(
        loop_once_more, 1, process_group=False, directory=str(tmp_path / "run"), steps=30
    )
    assert again == [["rank 0: finished 30 steps, sent 0 bytes"]]


def losses(lines: list[str]) -> dict[int, float]:
    found = [re.fullmatch(r"step (\d+): loss ([\d.]+) nats", line) for line in lines]
    return {int(line[1]): float(line[2]) for line in found if line}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_run_files_end_as_they_say(tmp_path: Path) -> None:
    command, reports = (sys.executable, "-m", "isthmus", "train"), {}
    for recipe in ("first-run", "int8-gradients", "my-own-text"):
        done = subprocess.run(
            [*command, str(RECIPES / f"{recipe}.toml"), "--run-dir", str(tmp_path / recipe)],
            cwd=RECIPES.parent,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        reports[recipe] = json.loads((tmp_path / recipe / "report.json").read_text())
    reached = {name: report["loss"]["validation_nats"] for name, report in reports.items()}
    sent = {name: report["sent_nbytes_per_step"] for name, report in reports.items()}
    assert reached["first-run"] < 1.7
    assert abs(reached["int8-gradients"] - reached["first-run"]) < 0.03
    assert reached["my-own-text"] < reports["my-own-text"]["loss"]["bigram_nats"]
    assert round(sent["first-run"] / 1e6, 2) == 4.07
    assert round(sent["int8-gradients"] / 1e6, 2) == 1.55
