"""Loading: precedence, origins, inheritance, and errors that say all that is wrong at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError
from isthmus.spec.cluster import ClusterSpec
from isthmus.spec.load import load, to_toml
from isthmus.spec.run import RunSpec, differences

SITE_A = '[[sites]]\nname="a"\n[[sites.hosts]]\nname="h"\n'


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_later_source_wins_and_is_named(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "seed = 1\n[train]\nsteps = 10\nglobal_batch_size = 4\n")
    run = write(tmp_path / "run.toml", 'extends = "base.toml"\n[train]\nsteps = 20\n')
    resolved = load(RunSpec, run, ["train.validation_samples=8"])
    train = resolved.spec.train
    assert (train.steps, train.global_batch_size, train.validation_samples) == (20, 4, 8)
    assert resolved.origin("train.steps") == str(run)
    assert resolved.origin("seed") == str(tmp_path / "base.toml")
    assert resolved.origin("train.validation_samples") == "--set train.validation_samples=8"
    assert resolved.origin("train.compile") == "default"


@pytest.mark.parametrize("setting", ["model=gpt-3m", "model.preset=gpt-3m"])
def test_what_a_preset_brings_comes_from_where_it_was_named(setting: str) -> None:
    resolved = load(RunSpec, None, [setting, "model.num_layers=2"])
    assert resolved.origin("model.hidden_size") == f"--set {setting}"
    assert resolved.origin("model.num_layers") == "--set model.num_layers=2"
    assert resolved.origin("data.sequence_length") == "default"


def test_files_may_extend_several_and_the_last_wins(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", "seed = 1\n[train]\nsteps = 5\n")
    write(tmp_path / "b.toml", "seed = 2\n")
    run = write(tmp_path / "run.toml", 'extends = ["a.toml", "b.toml"]\n')
    spec = load(RunSpec, run).spec
    assert (spec.seed, spec.train.steps) == (2, 5)


def test_a_table_of_another_kind_is_replaced_not_merged(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", '[optimizer.schedule]\nkind = "wsd"\ndecay_fraction = 0.3\n')
    run = write(
        tmp_path / "run.toml", 'extends = "base.toml"\n[optimizer.schedule]\nkind = "constant"\n'
    )
    assert load(RunSpec, run).spec.optimizer.schedule.kind == "constant"


def test_a_bare_name_takes_further_settings() -> None:
    spec = load(
        RunSpec, None, ["sync=allreduce", "sync.codec=int8", "model=gpt-3m", "model.num_layers=2"]
    ).spec
    assert spec.model.num_layers == 2
    assert spec.model.hidden_size == load(RunSpec, None, ["model=gpt-3m"]).spec.model.hidden_size


def test_all_errors_are_reported_at_once_each_with_its_key(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run.toml",
        "sede = 3\n[train]\nstep = 10\nglobal_batch_size = 0\n[optimizer]\nlearning_rte = 1\n"
        '[deadlines]\ncollective = 5\n[sync]\nkind = "allreduce"\nbuckets = 1\n',
    )
    with pytest.raises(ConfigError) as caught:
        load(RunSpec, run)
    text = caught.value.message
    for expected in (
        "sede: unknown key",
        "did you mean seed?",
        "train.step: unknown key",
        "did you mean train.steps?",
        "train.global_batch_size",
        "did you mean optimizer.learning_rate?",
        "collective needs a unit",
        "sync.buckets: unknown key",
        str(run),
    ):
        assert expected in text
    assert "allreduce.buckets" not in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed = ", "is not TOML"),
        ("extends = 3\n", "extends must be"),
        ('extends = "missing.toml"\n', "there is no file"),
        ('extends = "run.toml"\n', "extends itself"),
        ('[model]\npreset = "gpt-5t"\n', "gpt-10m"),
        ('sync = "carrier-pigeon"\n', "carrier-pigeon"),
        ('[deadlines]\ncollective = "5 parsecs"\n', "not a unit"),
        ("train = 3\n", "train"),
        ("\x00", "is not TOML"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str, part: str) -> None:
    run = write(tmp_path / "run.toml", text)
    with pytest.raises(ConfigError) as caught:
        load(RunSpec, run)
    assert part in caught.value.message


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    for path in (tmp_path / "no.toml", tmp_path):
        with pytest.raises(ConfigError):
            load(RunSpec, path)
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(RunSpec, tmp_path / "bin.toml")


@pytest.mark.parametrize("setting", ["train.steps", "=3", "train..steps=3", ".=1", ""])
def test_a_setting_that_is_none_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        load(RunSpec, None, [setting])


@given(
    st.dictionaries(
        st.sampled_from(
            ["seed", "train.steps", "train.global_batch_size", "checkpoint.every_steps"]
        ),
        st.integers(1, 10**6),
    )
)
def test_toml_reads_back_equal(settings: dict[str, int]) -> None:
    import tempfile

    resolved = load(RunSpec, None, [f"{key}={value}" for key, value in settings.items()])
    with tempfile.TemporaryDirectory() as directory:
        for text in (to_toml(resolved.spec), to_toml(resolved.spec, resolved)):
            again = load(RunSpec, write(Path(directory) / "run.toml", text))
            assert again.spec == resolved.spec


def test_only_what_changes_the_learning_counts_as_a_difference() -> None:
    base = RunSpec()
    assert differences(base, base) == []
    same = load(
        RunSpec,
        None,
        ["ranks=3", "checkpoint.keep_last=9", "name=other", "deadlines.rendezvous=5 s"],
    ).spec
    assert differences(base, same) == []
    other = load(RunSpec, None, ["seed=4", "optimizer.schedule.kind=linear"]).spec
    changed = {key: (old, new) for key, old, new in differences(base, other)}
    assert changed["seed"] == (0, 4)
    assert changed["optimizer.schedule.kind"] == ("wsd", "linear")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            '[[sites]]\nname="a"\n[[sites.hosts]]\nname="h"\n[[sites]]\nname="b"\n[[sites.hosts]]\nname="g"\n',
            "no link leads",
        ),
        (
            SITE_A + '[[links]]\nbetween=["a","z"]\nbandwidth="1 Mbit/s"\n',
            "names the site z",
        ),
        (
            '[[sites]]\nname="a"\n[[sites.hosts]]\nname="h"\n[[sites.hosts]]\nname="h"\n',
            "declared twice",
        ),
        (
            SITE_A + '[[sites.hosts.nics]]\nbandwidth="0 bit/s"\n',
            "greater than 0",
        ),
    ],
)
def test_a_cluster_that_cannot_be(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ClusterSpec, write(tmp_path / "cluster.toml", text))
    assert part in caught.value.message


def test_a_cluster_counts_its_devices(tmp_path: Path) -> None:
    text = (
        '[[sites]]\nname="a"\n[[sites.hosts]]\nname="h"\ncount=2\nnum_devices=4\n'
        'nics=[{bandwidth="10 Gbit/s"}]\n[[sites]]\nname="b"\nhosts=[{name="g"}]\n'
        '[[links]]\nbetween=["a","b"]\nbandwidth="100 Mbit/s"\nlatency="20 ms"\n'
    )
    cluster = load(ClusterSpec, write(tmp_path / "cluster.toml", text)).spec
    assert cluster.num_devices == 9
    assert cluster.host_names() == ("h0", "h1", "g")
    assert cluster.links[0].bandwidth_bytes_per_s == 12.5e6


@pytest.mark.parametrize(
    ("links", "nics", "part"),
    [
        ('[{between=["a","a"], bandwidth="1 MB/s"}]', "[]", "joins a with itself"),
        (
            '[{between=["a","b"], bandwidth="1 MB/s"}, {between=["b","a"], bandwidth="2 MB/s"}]',
            "[]",
            "the link a - b is declared twice",
        ),
        (
            '[{between=["a","b"], bandwidth="1 MB/s"}]',
            '[{bandwidth="1 MB/s"}, {bandwidth="1 MB/s"}]',
            "the NIC eth0 is declared twice",
        ),
        ('[{between=["a","b"], bandwidth="0 MB/s"}]', "[]", "greater than 0"),
    ],
)
def test_links_and_nics_that_cannot_be(tmp_path: Path, links: str, nics: str, part: str) -> None:
    text = f"""
        links = {links}
        [[sites]]
        name = "a"
        hosts = [{{name = "x", nics = {nics}}}]
        [[sites]]
        name = "b"
        hosts = [{{name = "y"}}]
    """
    with pytest.raises(ConfigError, match=part):
        load(ClusterSpec, write(tmp_path / "cluster.toml", text))
