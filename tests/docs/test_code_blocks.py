"""The documentation is run: its Python, its run files, its commands, and the output it shows.

What a page shows and is not executed says why in a comment before the block (see ``doc_pages``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from doc_pages import ROOT, Block, Page, pages
from pool import RankPool

from isthmus.cli.app import app, run
from isthmus.observe import CheckpointSaved, EventLog, RankStarted, RunStarted, Step, Validation
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load
from isthmus.spec.run import RunSpec
from isthmus.spec.tree import walk

PAGES = pages()
QUICK = {
    ("config",),
    ("report",),
    ("train", "--dry-run"),
    ("--help",),
    ("--version",),
}
"""Commands that are executed where a page shows them: those that have all of some words."""
LANGUAGES = {"python", "toml", "console", "bash", "text"}


def those_with(wanted: Any) -> Any:
    chosen = [page for page in PAGES if wanted(page)]
    assert chosen, "no page has any"
    return pytest.mark.parametrize("page", chosen, ids=str)


# --- a place to run in ----------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the recipes and one small run, in an environment of nobody's rank."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "ISTHMUS_", "TORCHELASTIC_")) or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_a_run(tmp_path / "runs" / "gpt-1m-stdlib")
    return tmp_path


def write_a_run(run_dir: Path) -> None:
    """The event log of a small run of two ranks, and the run.toml of the defaults."""
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "run.toml").write_text("")
    for rank in range(2):
        at: dict[str, Any] = {"time_s": 1.7e9, "rank": rank}
        with EventLog(run_dir / "events" / f"rank-{rank:05d}.jsonl") as log:
            log.emit(RankStarted(**at, host="a", pid=1, backend="gloo"))
            if rank == 0:
                log.emit(
                    RunStarted(
                        **at,
                        name=run_dir.name,
                        attempt=1,
                        world_size=2,
                        total_steps=9,
                        start_step=0,
                        launcher="isthmus",
                        device="cpu",
                        num_params=7,
                        config_digest="",
                    )
                )
            for step in range(1, 5):
                log.emit(
                    Step(
                        **at,
                        step=step,
                        loss_nats=5.0 - step,
                        grad_norm=1.0,
                        learning_rate=0.1,
                        tokens=64,
                        step_time_s=0.1 * step,
                        communication_time_s=0.01,
                        sent_nbytes=28,
                    )
                )
            if rank == 0:
                log.emit(Validation(**at, step=4, loss_nats=1.5, tokens=64, bits_per_byte=2.2))
                log.emit(CheckpointSaved(**at, step=4, path="x", nbytes=9, duration_s=0.1))


def write_files(page: Page, desk: Path) -> None:
    """Each titled block becomes the file that its title names."""
    for block in page.of("toml", "python"):
        if block.title:
            (desk / block.title).write_text(block.code)


# --- Python ---------------------------------------------------------------------------------------


def run_on_a_rank(rank: int, world_size: int, *, source: str, name: str, directory: str) -> None:
    """Executes a page's Python as one module, in a directory, as a rank under torchrun would."""
    import torch.distributed as dist

    os.chdir(directory)
    meeting = dist.FileStore(f"{directory}/meeting", world_size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": meeting.get("port").decode(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    file = Path(directory) / f"page_{rank}.py"
    file.write_text(source)
    before = set(sys.modules)
    sys.path.insert(0, directory)
    try:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(directory)
        for loaded in set(sys.modules) - before:
            if str(getattr(sys.modules[loaded], "__file__", "")).startswith(directory):
                del sys.modules[loaded]


def python_of(page: Page) -> str:
    """All untitled Python blocks in one module whose line numbers are those of the page."""
    lines = [""] * len(page.text.splitlines())
    for block in page.of("python"):
        if not block.title:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines) + "\n"


@those_with(lambda page: page.of("python"))
def test_python_runs(page: Page, desk: Path, ranks: RankPool) -> None:
    write_files(page, desk)
    imported = [b.title.removesuffix(".py") for b in page.of("python") if b.title]
    source = python_of(page)
    for name in imported:
        assert re.search(rf"\b(from|import) {name}\b", source), f"{name}.py is never imported"
    ranks.run(
        run_on_a_rank,
        page.num_ranks,
        process_group=False,
        source=source,
        name="page",
        directory=str(desk),
    )


def test_python_that_is_wrong_fails(desk: Path, ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="1 != 2"):
        ranks.run(
            run_on_a_rank,
            2,
            process_group=False,
            source="import torch.distributed as dist\ndist.init_process_group('gloo')\n"
            "assert dist.get_world_size() == 2\nassert False, '1 != 2'\n",
            name="page",
            directory=str(desk),
        )


def test_the_example_codec_passes_the_tests_of_all_codecs(desk: Path) -> None:
    """The page says that a new file in the room is tested by what is there."""
    (page,) = [page for page in PAGES if page.path.name == "add-a-codec.md"]
    write_files(page, desk)
    program = (
        "import sys, pytest, isthmus.codec\n"
        "isthmus.codec.__path__.append(sys.argv[1])\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:randomly', '-p', 'no:cacheprovider', '--rootdir',\n"
        "    sys.argv[2], f'{sys.argv[2]}/tests/unit/codec/test_every_codec.py', '-k', 'fp24']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(desk), str(ROOT)],
        capture_output=True,
        text=True,
        cwd=desk,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 8, done.stdout  # type: ignore[index]


# --- run files ------------------------------------------------------------------------------------


@those_with(lambda page: page.of("toml"))
def test_toml_loads(page: Page, desk: Path) -> None:
    write_files(page, desk)
    for block in page.of("toml"):
        table = tomllib.loads(block.code)
        if block.title == "pyproject.toml":
            continue
        file = desk / (block.title or f"line-{block.line}.toml")
        file.write_text(block.code)
        load(ClusterSpec if "sites" in table else RunSpec, file)


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/*.toml")), ids=lambda path: path.name)
def test_recipes_load_and_say_what_to_expect(recipe: Path) -> None:
    assert load(RunSpec, recipe).spec.name == recipe.stem
    assert "# Expected:" in recipe.read_text()


# --- commands -------------------------------------------------------------------------------------


def parse(words: tuple[str, ...], *, may_lack_arguments: bool = False) -> None:
    """Holds ``isthmus ...`` to the real command line, without running anything."""
    command: Any = typer.main.get_command(app)
    name, *arguments = words
    context = command.make_context(name, [], resilient_parsing=True)
    while hasattr(command, "commands"):
        if not arguments or arguments[0].startswith("-"):
            known = {option for each in command.get_params(context) for option in each.opts}
            assert set(arguments) <= known, f"{words}: no such option"
            return
        name, *arguments = arguments
        assert name in command.commands, f"{words}: no command {name}"
        command = command.commands[name]
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
    if "--help" in arguments:
        return
    try:
        command.make_context(name, list(arguments), parent=context.parent)
    except Exception as error:
        if not (may_lack_arguments and type(error).__name__ == "MissingParameter"):
            raise


def test_parsing_refuses_what_is_not_there() -> None:
    parse(("isthmus", "config", "show", "x.toml", "--origin"))
    with pytest.raises(AssertionError):
        parse(("isthmus", "trian"))
    with pytest.raises(Exception, match="No such option"):
        parse(("isthmus", "train", "--resume"))
    with pytest.raises(AssertionError):
        parse(("isthmus", "--versoin"))


def is_quick(words: tuple[str, ...]) -> bool:
    return any(all(word in words for word in wanted) for wanted in QUICK)


@those_with(lambda page: page.commands)
def test_commands_exist(page: Page) -> None:
    for command in page.commands:
        if command.words:
            parse(command.words)
        for script in re.findall(r"\bscripts/\w+", command.text):
            assert (ROOT / script).is_file(), f"{page}:{command.line}: no {script}"


@those_with(lambda page: any(is_quick(c.words) and not c.not_run for c in page.commands))
def test_quick_commands_print_what_the_page_shows(
    page: Page, desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(page, desk)
    for command in page.commands:
        if not is_quick(command.words) or command.not_run:
            continue
        code = run(list(command.words[1:]))
        out, err = capfd.readouterr()
        printed = [line.rstrip() for line in (out + err).splitlines()]
        refused = any(line.startswith("error:") for line in command.shown)
        assert (code != 0) == refused, f"{page}:{command.line}: exit code {code}\n{out}{err}"
        shown = [line.rstrip() for line in command.shown if line.strip() not in ("", "...")]
        missing = [line for line in shown if line not in printed]
        assert not missing, f"{page}:{command.line}: not printed: {missing}\n{out}{err}"


def test_torchrun_takes_the_options_that_pages_show(ranks: RankPool) -> None:
    lines = [
        (command.text, str(page))
        for page in PAGES
        for command in page.commands
        if re.match(r"(srun )?torchrun ", command.text.strip())
    ]
    assert lines
    ranks.run(parse_torchrun, 1, process_group=False, lines=lines)


def parse_torchrun(rank: int, world_size: int, *, lines: list[tuple[str, str]]) -> None:
    from torch.distributed.run import get_args_parser

    for text, page in lines:
        words = shlex.split(text)
        try:
            with contextlib.redirect_stderr(None):
                get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
        except SystemExit:
            raise AssertionError(f"{page}: torchrun does not take {text!r}") from None


def shell_scripts() -> list[tuple[Page, Block]]:
    return [(page, block) for page in PAGES for block in page.blocks if block.language == "bash"]


def test_shell_scripts_are_shell() -> None:
    assert shell_scripts()
    for page, block in shell_scripts():
        done = subprocess.run(
            ["bash", "-n"], input=block.code, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}:{block.line}: {done.stderr}"


# --- code in sentences ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_and_keys_in_sentences_exist(page: Page) -> None:
    keys = {key.path for key in walk(RunSpec)}
    tables = {path.split(".")[0] for path in keys if "." in path}
    for span in page.spans:
        if span.startswith("isthmus ") and not span.endswith("..."):
            parse(tuple(shlex.split(span)), may_lack_arguments=True)
        if re.fullmatch(rf"({'|'.join(tables)})\.(?!json)[a-z_.]+( = .+)?", span):
            assert span.split(" = ")[0] in keys, f"{page}: no key {span}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_is_not_run_says_why(page: Page) -> None:
    assert page.text.count("<!-- not run") == sum(bool(block.not_run) for block in page.blocks)
    assert all(len(block.not_run) > 12 for block in page.blocks if block.not_run)
    assert not [b for b in page.blocks if b.language not in LANGUAGES], (
        "a block of unknown language"
    )
