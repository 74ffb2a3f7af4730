"""What a compute node is asked, and what it answers. That it is asked at all: tests/slurm/test_node_check.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness import nodes, scheduler
from harness.cluster import Cluster, Container
from harness.command import inside, own_variables
from harness.expand import expand
from harness.node_check import MARK, SCRATCH, answer_in, problems
from harness.nodes import Sight, facts, look
from harness.run_folder import RunFolder
from harness.scheduler import SlurmError
from harness.spec import load
from harness.submit import submit
from tests.harness.test_spec import write


@pytest.fixture
def expansion(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    shapes = "{source: shapes, variant: {shapes: 2}}"
    path = write(tmp_path, shapes, "{source: ./rows.jsonl, agent: single_turn}")
    path.write_text(path.read_text().replace("task: {variant: {}}", "task: {}"))
    return expand(load(path), "here", tmp_path / "runs", base=tmp_path, write=False)


def test_a_node_is_asked_for_rows_environment_and_packages(expansion, tmp_path):
    asked = facts(expansion, expansion.runs, Cluster())
    assert ("task.source", str(tmp_path / "rows.jsonl")) in asked["places"]
    assert ("the environment of the submit", sys.executable) in asked["places"]
    assert asked["statements"] == ["import ray", "import torch", "import vllm"]
    assert "inside" not in asked


def test_with_a_container_the_node_needs_the_image_and_the_image_the_packages(expansion, tmp_path):
    box = Container(runtime="apptainer", image="/images/a.sif", mounts=("/models:/m:ro",))
    asked = facts(expansion, expansion.runs, Cluster(container=box))
    assert ("container.image", "/images/a.sif") in asked["places"]
    assert ("container.mounts", "/models") in asked["places"]
    assert "statements" not in asked and "import vllm" in asked["inside"]["statements"]
    assert f"{tmp_path}/rows.jsonl:{tmp_path}/rows.jsonl:ro" in asked["launch"]
    keys = [key for key, _ in asked["inside"]["places"]]
    assert "task.source" in keys and "container.image" not in keys


def asked_of(folder, **facts):
    return {"folder": str(folder), "places": [], "passed": [], "disk_gb": 0.0, **facts}


def test_a_run_and_what_looks_whether_it_can_be_have_the_same_variables_and_container(
    expansion, tmp_path
):
    """But for the mark, its stacks and its scratch, which a node makes for each."""
    submit(expansion, expansion.runs)
    folder = RunFolder(expansion.folder / expansion.replicates[0].name)
    attempt = folder.new_attempt()
    box = Container(runtime="apptainer", image="/images/a.sif")
    profile = Cluster(container=box, environment={"GREETING": "hello", "HF_TOKEN": None})

    def variables(line):
        given = dict(part.split("=", 1) for part in line[line.index("env") + 1 :] if "=" in part)
        return {k: v for k, v in given.items() if k not in ("MOLT_RUN", "MOLT_STACKS")}

    run = folder.run | {"image": {"path": "/images/a.sif"}}
    own = inside(folder, run, attempt, SCRATCH, profile, [])
    looked = facts(expansion, expansion.runs, profile)["launch"]
    assert variables(looked) == variables(own)
    assert looked[: looked.index("--bind")] == own[: own.index("--bind")]
    plain = facts(expansion, expansion.runs, Cluster())["variables"]
    assert plain == {
        k: v for k, v in own_variables(folder, folder.run, SCRATCH).items() if k in plain
    }
    assert plain["MOLT_CODE"] == str(expansion.snapshot.path.resolve())


def test_a_statement_is_made_with_the_runs_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "only_there.py").write_text("")
    variables = {"PYTHONPATH": str(tmp_path / "own"), "TMPDIR": SCRATCH}
    check = "import only_there, os; assert os.path.isdir(os.environ['TMPDIR'])"
    asked = asked_of(tmp_path, statements=[check], variables=variables)
    assert problems(asked) == []
    (said,) = problems({**asked, "variables": {}})
    assert said.endswith("ModuleNotFoundError: No module named 'only_there'")


def test_too_little_disk_at_the_node_is_said_of_the_runs_and_of_the_scratch(tmp_path):
    shared, scratch = problems(asked_of(tmp_path, disk_gb=1e9))
    assert shared.startswith(f"{tmp_path} has ") and "and 1000000000.0 are needed" in shared
    assert scratch.endswith("make room, or set TMPDIR in the profile")


def test_a_variable_that_does_not_reach_the_job_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (said,) = problems(asked_of(tmp_path, passed=["HF_TOKEN"]))
    assert said.startswith("environment.HF_TOKEN: it is not set in a job on ")


def test_a_node_without_the_runtime_says_so(tmp_path):
    asked = asked_of(tmp_path, launch=["no-such-runtime"], inside={})
    (said,) = problems(asked)
    assert said.startswith("container.runtime: there is no no-such-runtime on ")


def test_a_container_that_cannot_be_entered_is_said_in_its_own_words(tmp_path):
    launch = ["sh", "-c", "echo FATAL: image is torn >&2; exit 255"]
    asked = asked_of(tmp_path, launch=launch, inside={})
    (said,) = problems(asked)
    assert said.startswith("the container cannot be entered on ") and said.endswith("image is torn")


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path):
    (said,) = problems(asked_of(tmp_path / "gone"))
    assert said.startswith(f"{tmp_path}/gone cannot be written on ")


def test_the_answer_is_found_among_a_sites_own_lines():
    assert answer_in(f'Welcome!\n{MARK}["a"]\nBye\n') == ["a"]
    assert answer_in("slurmstepd: error: no such file\n") is None


SBATCH = """#!/bin/sh
number=$(($(cat "$LAB/count") + 1)); echo $number > "$LAB/count"; cat > "$LAB/script"
[ -e "$LAB/silent" ] && exec sleep 60
echo $number
[ "$(sed -n ${number}p "$LAB/states")" = COMPLETED ] &&
    echo 'WHAT A NODE SEES []' > "$(sed -n 's/#SBATCH --output=//p' "$LAB/script")"
exit 0
"""
SCONTROL = """#!/bin/sh
number=$(cat "$LAB/count")
echo "JobId=$number JobState=$(sed -n ${number}p "$LAB/states") Reason=None NodeList=node2"
"""


@pytest.fixture
def slurm_says(tmp_path, monkeypatch):
    """slurm_says(state, ...): how the first, the second ... job that looks ends; one that COMPLETED found nothing wrong."""
    lab = tmp_path / "lab"
    lab.mkdir()
    noted = 'echo "$@" >> "$LAB/scancelled"\n'
    scripts = {"sbatch": SBATCH, "scontrol": SCONTROL, "scancel": noted}
    scripts |= {"squeue": "true\n", "sacct": "exit 1\n"}  # as of a job that ended a while ago
    for name, text in scripts.items():
        (lab / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}")
        (lab / name).chmod(0o755)
    (lab / "count").write_text("0")
    monkeypatch.setenv("PATH", f"{lab}:{os.environ['PATH']}")
    monkeypatch.setenv("LAB", str(lab))
    monkeypatch.setattr(scheduler, "_asked", {})

    def say(*states: str) -> Path:
        (lab / "states").write_text("\n".join([*states, ""]))
        return lab

    return say


def test_a_look_that_was_preempted_is_repeated(expansion, slurm_says):
    slurm_says("PREEMPTED", "COMPLETED")
    assert look(expansion, expansion.runs, Cluster()) == Sight()


@pytest.mark.parametrize(
    ("states", "jobs", "said"),
    [
        (("PREEMPTED", "NODE_FAIL"), "2", "the job that looks ended NODE_FAIL on node2"),
        (("CANCELLED", "COMPLETED"), "1", "the job that looks ended CANCELLED on node2"),
    ],
    ids=["taken", "cancelled"],
)
def test_a_look_that_others_ended_has_seen_nothing_and_refuses_nothing(
    expansion, slurm_says, states, jobs, said
):
    lab = slurm_says(*states)
    assert look(expansion, expansion.runs, Cluster()) == Sight(unchecked=said)
    assert (lab / "count").read_text().strip() == jobs


def test_a_look_that_failed_by_itself_is_a_problem(expansion, slurm_says):
    slurm_says("FAILED")
    (said,) = look(expansion, expansion.runs, Cluster()).problems
    assert said.startswith("the job that looks at a node failed; it left no word")


def test_an_sbatch_that_says_nothing_is_not_waited_for_for_ever(expansion, slurm_says, monkeypatch):
    lab = slurm_says("PENDING")
    (lab / "silent").touch()
    monkeypatch.setattr(nodes, "ANSWER_S", 0.3)
    with pytest.raises(SlurmError, match="sbatch: timed out"):
        look(expansion, expansion.runs, Cluster())
    assert (lab / "scancelled").read_text().startswith("--name=small-check-")  # it may have arrived
