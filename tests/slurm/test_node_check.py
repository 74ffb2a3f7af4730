"""A submit asks a compute node first: what only the login node has is said before anything is queued."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import nodes
from harness.nodes import Sight, look
from tests.slurm.conftest import LOCAL, run, wait_until


@pytest.fixture
def only_here(tmp_path):
    """A folder that this process sees and no node does: it was mounted after the nodes' namespaces were made."""
    place = tmp_path / "scratch"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def looks() -> list[tuple[str, str]]:
    """(id, state) of the jobs that look at a node, the newest last."""
    lines = run(
        "squeue", "--noheader", "--states=all", "--sort=i", "--format=%i %T %j"
    ).splitlines()
    found = [line.split() for line in lines]
    return [(job, state) for job, state, name in found if name.startswith("small-check-")]


def test_what_no_node_sees_and_what_does_not_import_is_said(light, only_here, monkeypatch):
    plugin = only_here / "mine.py"
    plugin.write_text("")
    monkeypatch.setattr(nodes, "packages", lambda expansion: {"json", "nothing_of_that_name"})
    expansion = light(protocol=f"  algorithm: {{plugins: [{plugin}]}}\n")
    sight = look(
        expansion, expansion.runs, LOCAL.model_copy(update={"sbatch": {"nodelist": "node2"}})
    )
    place, package = sight.problems
    assert place == (
        f"algorithm.plugins[0]: {plugin} is not there as node2 sees it; put it where compute nodes see it"
    )
    assert package.startswith("`import nothing_of_that_name` fails on node2")
    assert package.endswith("ModuleNotFoundError: No module named 'nothing_of_that_name'")
    assert [*expansion.folder.iterdir()] == []  # nothing is left of it


def test_a_folder_of_runs_that_no_node_sees_is_said(light, only_here):
    expansion = light(runs=only_here / "runs")
    (said,) = look(expansion, expansion.runs, LOCAL).problems
    assert said.startswith("the job that looks at a node failed; ") and str(only_here) in said


def test_no_node_in_time_is_no_refusal_and_leaves_nothing_in_the_queue(light):
    hold = ["--exclusive", "--nodelist=node3", "--output=/dev/null", "--wrap", "sleep 60"]
    job = run("sbatch", "--parsable", *hold)
    try:
        expansion = light()
        busy = LOCAL.model_copy(update={"sbatch": {"nodelist": "node3"}})
        assert look(expansion, expansion.runs, busy, 2) == Sight(
            unchecked="no node answered within 2 s"
        )
        assert looks()[-1][1] == "CANCELLED"
    finally:
        run("scancel", job)


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_container_is_looked_into(boxed, monkeypatch, runtime):
    monkeypatch.setattr(nodes, "packages", lambda expansion: {"json", "nothing_of_that_name"})
    expansion, profile = boxed(runtime, "")
    (said,) = look(expansion, expansion.runs, profile).problems
    assert said.startswith("in the container: `import nothing_of_that_name` fails on node")


def test_a_look_that_somebody_cancels_refuses_nothing(light, monkeypatch):
    monkeypatch.setattr(nodes, "packages", lambda expansion: {"time; time.sleep(60)"})
    expansion = light()
    before = looks()
    with ThreadPoolExecutor(1) as beside:
        seen = beside.submit(look, expansion, expansion.runs, LOCAL)
        (found,) = wait_until(
            lambda: [
                job for job, state in looks() if (job, state) not in before and state == "RUNNING"
            ]
        )
        run("scancel", found)
        sight = seen.result(60)
    assert sight.problems == ()
    assert sight.unchecked.startswith("the job that looks ended CANCELLED on node")
