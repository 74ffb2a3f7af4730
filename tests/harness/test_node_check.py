"""What a compute node is asked, and what it answers. That it is asked at all: tests/slurm/test_node_check.py."""

from __future__ import annotations

import sys

import pytest

from harness.cluster import Cluster, Container
from harness.expand import expand
from harness.node_check import MARK, answer_in, problems
from harness.nodes import facts
from harness.spec import load
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


def test_a_node_without_the_runtime_says_so(tmp_path):
    asked = {"folder": str(tmp_path), "places": [], "launch": ["no-such-runtime"], "inside": {}}
    (said,) = problems(asked)
    assert said.startswith("container.runtime: there is no no-such-runtime on ")


def test_a_container_that_cannot_be_entered_is_said_in_its_own_words(tmp_path):
    launch = ["sh", "-c", "echo FATAL: image is torn >&2; exit 255"]
    asked = {"folder": str(tmp_path), "places": [], "launch": launch, "inside": {}}
    (said,) = problems(asked)
    assert said.startswith("the container cannot be entered on ") and said.endswith("image is torn")


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path):
    (said,) = problems({"folder": f"{tmp_path}/gone", "places": [], "statements": []})
    assert said.startswith(f"{tmp_path}/gone cannot be written on ")


def test_the_answer_is_found_among_a_sites_own_lines():
    assert answer_in(f'Welcome!\n{MARK}["a"]\nBye\n') == ["a"]
    assert answer_in("slurmstepd: error: no such file\n") is None
