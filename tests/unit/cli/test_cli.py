"""The command line: what it imports, how it fails, and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.cli.app import run


def imported_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def quiet(arguments: list[str]) -> str:
    """A program that runs a command and shows nothing."""
    return (
        "import contextlib, io\n"
        "from isthmus.cli.app import run\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):\n"
        f"    run({arguments})"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import isthmus",
        "import isthmus.spec.run; isthmus.spec.run.RunSpec()",
        quiet(["--help"]),
        quiet(["config", "show", "--origin"]),
        quiet(["train", "--dry-run"]),
        "import isthmus.elastic.launcher, isthmus.train.start",
    ],
    ids=["import", "spec", "help", "config show", "train --dry-run", "launcher"],
)
def test_what_needs_no_tensor_does_not_import_torch(code: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "torch" not in imported_by(code)


def test_help_imports_neither_pydantic_nor_numpy() -> None:
    code = quiet(["--help"])
    assert not {"pydantic", "numpy"} & imported_by(code)


@pytest.mark.parametrize(
    "spelling", [["-m", "isthmus"], ["-c", "from isthmus.__main__ import main; main()"]]
)
def test_both_spellings_are_the_same_command(spelling: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *spelling, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("isthmus 0.")


BAD = [
    (["train", "--ranks", "0"], "ranks"),
    (["train", "--ranks", "two"], "ranks"),
    (["train", "missing.toml"], "there is no file missing.toml"),
    (["train", "--set", "train.stesp=3"], "did you mean train.steps"),
    (["train", "--set", "train.global_batch_size=7"], "does not divide by 2 ranks"),
    (["train", "--set", "deadlines.collective=5"], "needs a unit"),
    (["train", "--set", "deadlines.collective=5 lightyears"], "not a unit"),
    (["train", "--set", "parallel.data=3"], "parallel.data = 3"),
    (["train", "--set", "data.sequence_length=100000"], "max_sequence_length"),
    (["config", "explain", "train.stps"], "train.steps"),
    (["report", "nowhere"], "nowhere"),
    (["checkpoint", "ls", "nowhere"], "nowhere"),
    (["checkpoint", "verify", "nowhere"], "nowhere"),
    (["fly"], "fly"),
]


@pytest.mark.parametrize(("arguments", "part"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    shown = capfd.readouterr()
    assert part in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_config_show_reads_back(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["config", "show", "--set", "seed=4", "--origin"]) == 0
    text = capfd.readouterr().out
    assert "seed = 4  # --set seed=4" in text
    (tmp_path / "again.toml").write_text(text)
    assert run(["config", "show", "again.toml", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["seed"] == 4


@pytest.mark.parametrize(
    "key",
    [
        "train.steps",
        "sync.codec",
        "sync.codec.block",
        "train",
        "sites.hosts.nics.bandwidth_bytes_per_s",
        "optimizer.schedule.warmup_steps",
    ],
)
def test_every_kind_of_key_is_explained(key: str, capfd) -> None:
    assert run(["config", "explain", key]) == 0
    assert key in capfd.readouterr().out


def test_every_key_of_the_default_run_is_explained(capfd) -> None:
    from isthmus.spec.run import RunSpec
    from isthmus.spec.tree import walk

    for path in {key.path for key in walk(RunSpec)}:
        assert run(["config", "explain", path]) == 0, path
    capfd.readouterr()


@pytest.mark.parametrize("options", [[], ["--cluster"]])
def test_the_schema_is_json_schema(options: list[str], capfd) -> None:
    assert run(["config", "schema", *options]) == 0
    schema = json.loads(capfd.readouterr().out)
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
