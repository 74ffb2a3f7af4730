"""The text that sbatch is given, whole, beside golden files.  python -m tests.harness.test_sbatch   writes them anew"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness import sbatch
from harness.cluster import Attempts, Cluster, Container
from harness.experiment_file import Resources
from harness.sbatch import Array, Task

GOLDEN = Path(__file__).parent / "golden"
GPU = dict(device="cuda", devices_per_node=8, cpus_per_node=96, time_limit="24:00:00")
PROFILE = Cluster(
    partition="gpu",
    account="lab",
    setup=("module load cuda",),
    environment={"NCCL_DEBUG": "WARN", "GREETING": "two words"},
    sbatch={"mail-type": "FAIL", "nodes": "1-2", "wckey": None},
    attempts=Attempts(),
)
CONTAINERS = {
    "none": Container(),
    "apptainer": Container(
        runtime="apptainer", image="/images/molt.sif", mounts=("/data:/data:ro", "/models")
    ),
    "pyxis": Container(
        runtime="pyxis", image="/images/molt.sqsh", mounts=("/data:/data:ro", "/models")
    ),
}


def text(runtime: str, nodes: int, tasks: int) -> str:
    resources = Resources(nodes=nodes, **GPU)
    runs = tuple(Task(f"molt-s{n}-0", "train", ("warmup-0",), resources) for n in range(tasks))
    array = Array(runs, resources, parallel=min(4, tasks))
    profile = PROFILE if tasks > 1 else Cluster()
    profile = profile.model_copy(update={"container": CONTAINERS[runtime]})
    after = {"warmup-0": "7_0"} if tasks > 1 else {}
    bad = ["n13"] if tasks > 1 else []
    code, logs = Path("/runs/.code/0123"), Path("/runs/x/y/slurm")
    return sbatch.script(array, profile, "x-y-train-0", after, code, logs, bad)


SHAPES = {"one_node": (1, 1), "two_nodes": (2, 1), "array": (2, 6)}
CASES = {f"{r}-{name}": (r, *shape) for r in CONTAINERS for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def a_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_golden_one(name):
    assert text(*CASES[name]) == (GOLDEN / f"{name}.sbatch").read_text()


def directives(**sbatch_) -> list[str]:
    profile = PROFILE.model_copy(update={"sbatch": sbatch_})
    resources = Resources(nodes=1, **GPU)
    array = Array((Task("molt-s0-0", "train", (), resources),), resources)
    found = sbatch.script(array, profile, "x", {}, Path("/code"), Path("/logs"), ["n13"])
    return [line for line in found.splitlines() if line.startswith("#SBATCH")]


def test_a_directive_of_the_profile_stands_in_place_of_ours_and_not_before_it():
    """Of two lines sbatch takes the last."""
    found = directives(**{"cpus-per-task": 8})
    assert [line for line in found if "cpus" in line] == ["#SBATCH --cpus-per-task=8"]


@pytest.mark.parametrize("value", [None, False])
def test_a_directive_can_be_removed(value):
    assert not any("requeue" in line for line in directives(requeue=value))
    assert not any("cpus" in line for line in directives(**{"cpus-per-task": value}))


def test_nodes_that_failed_join_those_that_the_profile_avoids():
    found = directives(exclude="n[01-02]")
    assert [line for line in found if "exclude" in line] == ["#SBATCH --exclude='n[01-02],n13'"]


def test_what_jobs_are_found_by_is_not_the_profiles():
    with pytest.raises(ValueError, match="job-name: the harness finds its jobs by it"):
        Cluster(sbatch={"job-name": "mine"})


if __name__ == "__main__":
    sys.executable = "/venv/bin/python"
    for name, case in CASES.items():
        (GOLDEN / f"{name}.sbatch").write_text(text(*case))
