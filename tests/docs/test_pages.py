"""What pages say about the repository: links, file names, the README's tree, quoted errors."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import GENERATED, ROOT, Page, pages, slug

PAGES = pages()
README = Page(ROOT / "README.md")
SOURCE = ROOT / "src" / "isthmus"


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_reference", ROOT / "docs" / "generate_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def generated() -> dict[str, str]:
    return generator().pages()


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        if re.match(r"https?://|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        if path.parent == GENERATED:
            assert path.name in generated(), f"{page}: {link} is not generated"
            continue
        assert path.exists(), f"{page}: {link} does not exist"
        if anchor:
            assert anchor in Page(path).anchors, f"{page}: {link} has no such heading"


def test_links_out_of_the_site_stay_inside_the_documentation() -> None:
    """The site holds docs/ only, so a page there can't link to the repository around it."""
    for page in PAGES:
        if ROOT / "docs" in page.path.parents:
            for link in page.links:
                if not re.match(r"https?://|#", link):
                    path = (page.path.parent / link.partition("#")[0]).resolve()
                    assert ROOT / "docs" in path.parents, f"{page}: {link} is not in the site"


def test_anchors_are_made_as_code_hosts_make_them() -> None:
    assert slug("What `isthmus train` does: a *tour*") == "what-isthmus-train-does-a-tour"


def test_every_page_is_in_the_navigation() -> None:
    """A page that nobody can reach is not there."""
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    written = {
        str(page.path.relative_to(ROOT / "docs"))
        for page in PAGES
        if ROOT / "docs" in page.path.parents
    }
    assert listed == written | {f"reference/generated/{name}" for name in generated()}


# --- files and folders ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_named_in_sentences_exist(page: Page) -> None:
    """Code spans such as ``src/isthmus/sync/replica.py`` or ``sync/replica.py``."""
    for span in page.spans:
        if re.fullmatch(r"[\w./-]+\.py", span) and "/" in span:
            roots = (ROOT, SOURCE)
            assert any((root / span).is_file() for root in roots), f"{page}: no file {span}"
        if re.fullmatch(r"(src|tests|docs|scripts|recipes|benchmarks)/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page}: no {span}"


def tree_of(page: Page) -> dict[str, str]:
    """Folders and files of a page's tree, each with what is said of it."""
    (block,) = [b for b in page.blocks if b.language == "text" and "src/isthmus/" in b.code]
    named: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in block.code.splitlines():
        name, _, about = line.strip().partition("  ")
        depth = len(line) - len(line.lstrip())
        above = [(d, n) for d, n in above if d < depth]
        parent = above[-1][1] if above else ""
        for each in name.split():
            named[f"{parent}{each}"] = about.strip()
        if name.endswith("/"):
            above.append((depth, f"{parent}{name}"))
    return named


def test_the_tree_of_the_readme_is_the_tree() -> None:
    named = tree_of(README)
    assert all((ROOT / path).exists() for path in named), named
    assert all(named.values()), "a folder without its line"
    rooms = {f"src/isthmus/{init.parent.name}/" for init in SOURCE.glob("*/__init__.py")}
    assert rooms <= set(named)
    tops = {f"{path.name}/" for path in ROOT.iterdir() if (path / "..").exists() and is_ours(path)}
    assert tops <= {path.split("/")[0] + "/" for path in named}


def is_ours(path: Path) -> bool:
    ignored = (ROOT / ".gitignore").read_text().split()
    return path.is_dir() and not path.name.startswith(".") and f"{path.name}/" not in ignored


# --- quoted errors --------------------------------------------------------------------------------


@cache
def messages() -> str:
    """The package's source with strings that stand side by side joined."""
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text) + "No space left on device"


def test_quoted_errors_are_in_the_source() -> None:
    (page,) = [page for page in PAGES if page.path.name == "when-something-fails.md"]
    quoted = re.findall(r"^\| `([^`]+)` \|", page.text.partition("## Symptoms")[2], re.MULTILINE)
    assert len(quoted) > 5
    for text in quoted:
        fragments = re.split(r"\.\.\.|\bN\b|\bnan\b|[\d()]+ ?s?", text)
        for fragment in filter(None, map(str.strip, fragments)):
            assert fragment in messages(), f"no error says {fragment!r}"


# --- the generated reference ----------------------------------------------------------------------


def test_the_reference_names_every_key_and_command() -> None:
    from isthmus.spec.run import RunSpec
    from isthmus.spec.tree import walk

    run_file = generated()["run-file.md"]
    for key in walk(RunSpec):
        assert f"| `{key.path.rpartition('.')[2]}` |" in run_file
    assert '`[sync.codec]` with `kind = "int8"`' in run_file
    assert "## `isthmus checkpoint verify`" in generated()["commands.md"]


def test_the_reference_names_every_public_name_and_event() -> None:
    import isthmus
    from isthmus.observe.events import AnyEvent

    for name in isthmus.__all__:
        assert f"::: isthmus.{name}\n" in generated()["python.md"]
    assert generated()["events.md"].count("::: ") == len(AnyEvent.__args__)


def test_docstrings_become_markdown() -> None:
    spec = importlib.util.spec_from_file_location("griffe_rst", ROOT / "docs" / "griffe_rst.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "See :class:`~isthmus.sync.Replica`, then::\n\n    a = 1\n\n    b = 2\n\nThe end."
    assert module.to_markdown(text) == (
        "See `Replica`, then:\n\n```text\na = 1\n\nb = 2\n```\n\nThe end."
    )


# --- the site -------------------------------------------------------------------------------------


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("generated"))
    for name, text in generated().items():
        (tmp_path / "docs/reference/generated").mkdir(exist_ok=True)
        (tmp_path / "docs/reference/generated" / name).write_text(text)
    program = (
        "import sys\n"
        "from mkdocs.commands.build import build\n"
        "from mkdocs.config import load_config\n"
        "docs, site = sys.argv[1:]\n"
        "build(load_config('mkdocs.yml', docs_dir=docs, site_dir=site, strict=True))\n"
    )
    folders = [str(tmp_path / "docs"), str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-c", program, *folders],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    html = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.html"))
    assert len(html) > 100_000
    assert "isthmus.codec.int8" in html
    loaded = re.findall(r'<(?:script|link|img|iframe|source)[^>]+(?:src|href)="([^"]+)"', html)
    assert not [target for target in loaded if re.match(r"(https?:)?//", target)]
