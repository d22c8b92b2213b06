"""``isthmus train`` as a user runs it: to the end, through kills and signals, under torchrun.

Promises kept here: 6 (the first failure is shown and kept), 7 (the data position is in the
checkpoint), 9 (a damaged checkpoint is never loaded), 14 (a changed configuration is never silent).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from isthmus.observe.events import CheckpointRejected, Step
from isthmus.observe.log import read_events, read_run
from isthmus.observe.timeline import Timeline

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

RUN = """
name = "tiny"
[model]
num_layers = 1
hidden_size = 64
intermediate_size = 64
[data]
kind = "files"
split = "tail"
paths = ["text"]
sequence_length = 32
[train]
steps = 60
validate_every_steps = 20
validation_samples = 8
[checkpoint]
every_steps = 10
[observe]
log_interval = "1 s"
"""


class Shop:
    """A directory to train in, and the command to do it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "text").mkdir(parents=True)
        for name in ("argparse", "ast", "inspect"):
            source = Path(os.__file__).parent / f"{name}.py"
            (path / "text" / f"{name}.txt").write_bytes(source.read_bytes())
        (path / "run.toml").write_text(RUN)
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC"))},
            "ISTHMUS_CACHE": str(path / "cache"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def start(
        self,
        *options: str,
        program: tuple[str, ...] = (sys.executable, "-m", "isthmus"),
        **variables: str,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*program, "train", "run.toml", *options],
            cwd=self.path,
            env=self.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, *options: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_dir(self, name: str = "tiny") -> Path:
        return self.path / "runs" / name

    def losses(self, name: str = "tiny") -> dict[int, float]:
        timeline = Timeline.of(read_run(self.run_dir(name)).events)
        return {step.step: step.loss_nats for step in timeline.steps[0]}

    def wait_for_step(
        self, process: subprocess.Popen[str], wanted: int, name: str = "tiny"
    ) -> None:
        log = self.run_dir(name) / "events" / "rank-00000.jsonl"
        give_up_at = time.monotonic() + 90
        while time.monotonic() < give_up_at:
            assert process.poll() is None, process.communicate()
            if log.exists() and any(
                isinstance(e, Step) and e.step >= wanted for e in read_events(log).events
            ):
                return
            time.sleep(0.02)
        raise AssertionError(f"step {wanted} was not reached")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    before = set(psutil.Process().children(recursive=True))
    yield Shop(tmp_path)
    left = [
        p
        for p in psutil.Process().children(recursive=True)
        if p not in before and "isthmus" in " ".join(p.cmdline())
    ]
    assert left == []


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Shop, subprocess.CompletedProcess[str]]:
    shop = Shop(tmp_path_factory.mktemp("undisturbed"))
    return shop, shop.train()


def test_a_run_trains_reports_and_says_when_it_is_finished(undisturbed) -> None:
    shop, done = undisturbed
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    assert list(shop.losses()) == list(range(1, 61))
    report = json.loads((shop.run_dir() / "report.json").read_text())
    assert report["loss"]["bigram_nats"] > report["loss"]["trigram_nats"] > 0
    assert "<svg" in (shop.run_dir() / "report.html").read_text()
    assert sorted(path.name for path in (shop.run_dir() / "checkpoint").iterdir()) == [
        "step-00000050",
        "step-00000060",
    ]
    events_before = (shop.run_dir() / "events" / "rank-00000.jsonl").read_bytes()
    again = shop.train()
    assert again.returncode == 0
    assert "is finished" in again.stderr
    assert (shop.run_dir() / "events" / "rank-00000.jsonl").read_bytes() == events_before


def test_killed_and_resumed_is_bit_identical_to_undisturbed(shop: Shop, undisturbed) -> None:
    process = shop.start()
    shop.wait_for_step(process, 23)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    resumed = shop.train()
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stderr
    assert shop.losses() == undisturbed[0].losses()
    validations = [e.loss_nats for e in Timeline.of(read_run(shop.run_dir()).events).validations]
    expected = [
        e.loss_nats for e in Timeline.of(read_run(undisturbed[0].run_dir()).events).validations
    ]
    assert validations == expected


def test_stopped_tampered_with_and_resumed(shop: Shop, undisturbed) -> None:
    """A stop keeps the state; changed data and a damaged checkpoint are noticed and named."""
    process = shop.start()
    shop.wait_for_step(process, 33)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert not (shop.run_dir() / "error.json").exists()
    newest = sorted((shop.run_dir() / "checkpoint").glob("step-????????"))[-1]
    assert int(newest.name.removeprefix("step-")) >= 33

    text = shop.path / "text" / "ast.txt"
    original = text.read_bytes()
    text.write_bytes(original.replace(b"def ", b"fed ", 1))
    refused = shop.train()
    assert refused.returncode == 2, refused.stderr
    assert "ast.txt" in refused.stderr
    assert "Traceback" not in refused.stderr
    text.write_bytes(original)

    damaged = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    done = shop.train()
    assert done.returncode == 0, done.stderr
    rejected = [e for e in read_run(shop.run_dir()).events if isinstance(e, CheckpointRejected)]
    assert len(rejected) == 1
    assert damaged.name in rejected[0].reason
    assert shop.losses() == undisturbed[0].losses()


def test_a_rank_that_is_killed_ends_the_run_and_is_named(shop: Shop) -> None:
    process = shop.start()
    shop.wait_for_step(process, 5)
    victim = next(
        p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1"
    )
    victim.kill()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    error = json.loads((shop.run_dir() / "error.json").read_text())
    assert error["rank"] == 1
    assert "SIGKILL" in error["kind"] + error["message"]
    assert "rank 1" in err


def test_stopped_while_it_starts_it_says_that_nothing_was_saved(shop: Shop) -> None:
    process = shop.start()
    ranks: list[psutil.Process] = []
    while len(ranks) < 2:
        assert process.poll() is None
        ranks = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "stopped before the first checkpoint" in err
    assert "Traceback" not in err


def test_a_changed_configuration_gets_its_own_directory(undisturbed) -> None:
    shop, _ = undisturbed
    before = shop.losses()
    changes = ("--set", "train.steps=2", "--set", "seed=1")
    assert shop.train(*changes, "--dry-run").returncode == 0
    assert not shop.run_dir("tiny-2").exists()
    changed = shop.train(*changes)
    assert changed.returncode == 0
    assert "train.steps: 60 → 2" in changed.stderr
    assert list(shop.losses("tiny-2")) == [1, 2]
    assert shop.losses() == before
    refused = shop.train(*changes, "--run-dir", "runs/tiny")
    assert refused.returncode == 2
    assert "seed: 0 → 1" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_under_torchrun_it_joins_the_ranks_that_are_there(shop: Shop, undisturbed) -> None:
    program = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "-m",
        "isthmus",
    )
    process = shop.start(program=program)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "validation loss" in out
    assert "step 60/60" in err
    assert shop.losses() == undisturbed[0].losses()


def test_under_slurm_it_meets_through_the_run_directory(shop: Shop, undisturbed) -> None:
    common = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    tasks = [
        shop.start(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **common) for rank in range(2)
    ]
    for task in tasks:
        _, err = task.communicate(timeout=120)
        assert task.returncode == 0, err
    assert shop.losses() == undisturbed[0].losses()


@pytest.mark.network
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_clear_error_and_keeps_the_last_good_checkpoint(
    shop: Shop, undisturbed
) -> None:
    (shop.path / "runs").mkdir()
    mounted: list[str] = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=1500k",
        "tmpfs",
        str(shop.path / "runs"),
    ]
    subprocess.run(mounted, check=True)
    try:
        full = shop.train()
        assert full.returncode == 1
        assert "Traceback" not in full.stderr
        assert "No space left" in full.stderr or "space" in full.stderr
        good = list((shop.run_dir() / "checkpoint").glob("step-*"))
        assert all((path / "manifest.json").exists() for path in good)
        subprocess.run(["mount", "-o", "remount,size=64m", str(shop.path / "runs")], check=True)
        assert shop.train().returncode == 0
        assert shop.losses() == undisturbed[0].losses()
    finally:
        subprocess.run(["umount", str(shop.path / "runs")], check=True)
