"""Whose memory the kernel killed for: this job's, and no neighbour's."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.memory import kills_in_job

GROUP = "slurm_n1/uid_0/job_12/step_batch/task_0"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """kernel(version, {group: count}) -> (own, mounts): files as the kernel shows them, for a process of job 12."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")

    def make(version: int, counts: dict[str, int], group: str = GROUP) -> tuple[Path, Path]:
        name = {1: "memory.oom_control", 2: "memory.events"}[version]
        for place, count in counts.items():
            folder = tmp_path / "cgroup" / place
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(f"oom 9\noom_kill {count}\noom_kill_disable 0\n")
        own, mounts = tmp_path / "own", tmp_path / "mounts"
        lines = {1: f"9:cpu:/elsewhere\n4:memory,x:/{group}\n0::/\n", 2: f"0::/{group}\n"}
        own.write_text(lines[version])
        kind = {1: "cgroup cgroup rw,memory", 2: "cgroup2 cgroup2 rw"}[version]
        mounts.write_text(
            "24 23 0:5 / /proc rw - proc proc rw\n"
            f"35 31 0:32 / {tmp_path}/cgroup rw,relatime shared:3 - {kind}\n"
        )
        return own, mounts

    return make


def test_under_v1_the_groups_of_the_job_are_added_up_and_a_neighbours_are_not(kernel):
    job = "slurm_n1/uid_0/job_12"
    counts = {GROUP: 1, f"{job}/step_0/task_0": 2, "slurm_n1/uid_0/job_13/step_batch": 5}
    assert kills_in_job(*kernel(1, counts | {"": 7, job: 0})) == 3


def test_under_v2_the_jobs_group_counts_all_below_it(kernel):
    counts = {"slurm_n1/uid_0/job_12": 2, GROUP: 1, "slurm_n1/uid_0/job_13": 5, "": 7}
    assert kills_in_job(*kernel(2, counts)) == 2


def test_outside_a_group_of_the_jobs_own_nothing_is_known(kernel, monkeypatch):
    files = kernel(1, {"user": 4, "": 7}, group="user")
    assert kills_in_job(*files) is None
    monkeypatch.delenv("SLURM_JOB_ID")
    assert kills_in_job(*files) is None
