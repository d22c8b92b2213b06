from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.measure.cgroup import CgroupLimits, cgroup_limits


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    at = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/batch/job",
            f"{at}/batch/job/cpu.max": "max 100000",
            f"{at}/batch/cpu.max": "250000 100000",
            f"{at}/batch/job/memory.max": "8000",
            f"{at}/batch/job/memory.current": "5000",
            f"{at}/batch/job/memory.stat": "anon 4000\ninactive_file 1000",
            f"{at}/batch/memory.max": "9000",
            f"{at}/batch/memory.current": "7500",
            f"{at}/batch/job/pids.max": "max",
            f"{at}/batch/pids.max": "300",
            f"{at}/other/cpu.max": "1000 100000",
        },
    )
    assert cgroup_limits(root) == CgroupLimits(
        cpus=2.5, memory_nbytes=8000, memory_left_nbytes=1500, processes=300
    )


def test_version_1_reads_each_controller_in_its_own_tree(tmp_path: Path) -> None:
    at = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/",
            f"{at}/cpu,cpuacct/job/cpu.cfs_quota_us": "150000",
            f"{at}/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            f"{at}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            f"{at}/cpu,cpuacct/cpu.cfs_period_us": "100000",
            f"{at}/memory/job/memory.limit_in_bytes": "4000",
            f"{at}/memory/job/memory.usage_in_bytes": "3000",
            f"{at}/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 500",
            f"{at}/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    found = cgroup_limits(root)
    assert found == CgroupLimits(
        cpus=1.5, memory_nbytes=4000, memory_left_nbytes=1500, processes=None
    )


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/"}])
def test_no_group_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert cgroup_limits(tree(tmp_path, files)) == CgroupLimits(None, None, None, None)


def test_damaged_files_are_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cpu.max": "a b",
        "sys/fs/cgroup/pids.max": "",
    }
    assert cgroup_limits(tree(tmp_path, files)) == CgroupLimits(None, None, None, None)
