"""What a run reads beyond the code is hashed whole at submit, and compared when an attempt starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.expand import expand
from harness.inputs import Places, changed, hashes, module_files, protocol_inputs, trainer_inputs
from harness.preflight import problems
from harness.prepare import write_config
from harness.run_folder import RunFolder
from harness.spec import load
from harness.submit import submit
from tests.harness.test_spec import write


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """outside({relative name: text}) -> the folder with these files, on the import path."""
    folder = tmp_path / "outside"

    def lay(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    monkeypatch.syspath_prepend(str(folder))
    return lay


def configuration(folder: Path, old: str, new: str):
    return load(write(folder, old, new)).scales["here"].config("ours", 0)


def agent_hash(folder: Path, name: str) -> str | None:
    config = configuration(folder, "source: shapes", f"source: shapes, agent: '{name}:Agent'")
    return hashes(protocol_inputs(config, Places(folder)))[f"{name}:Agent"]


def test_the_rows_of_a_file_count(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    config = configuration(tmp_path, "source: shapes", "source: ./rows.jsonl")
    before = hashes(protocol_inputs(config, Places(tmp_path)))
    rows.write_text("{ }\n")
    assert hashes(protocol_inputs(config, Places(tmp_path))) != before
    rows.unlink()
    assert hashes(protocol_inputs(config, Places(tmp_path))) == {"./rows.jsonl": None}


def test_the_weights_of_a_teacher_count_and_are_given_by_their_full_path(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "model.safetensors").write_bytes(b"abc")
    section = "  algorithm: {advantage: on_policy_distillation, teacher: big}\n  warmup:"
    path = write(tmp_path, "  warmup:", section)
    config = load(path).scales["here"].config("ours", 0)
    before = hashes(protocol_inputs(config, Places(tmp_path)))
    (tmp_path / "big" / "model.safetensors").write_bytes(b"abd")
    assert before.keys() == {"big"} and hashes(protocol_inputs(config, Places(tmp_path))) != before
    write_config(tmp_path / "config.yaml", config, Places(tmp_path))
    assert f"teacher: {tmp_path}/big" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("file", ["kit/prompt.txt", "kit/deep/tool.py", "kit/__init__.py"])
def test_every_file_of_an_agents_package_counts(tmp_path, outside, file):
    outside(
        {"kit/__init__.py": "", "kit/agent.py": "", "kit/deep/tool.py": "", "kit/prompt.txt": ""}
    )
    before = agent_hash(tmp_path, "kit.agent")
    outside({file: "# other\n"})
    assert agent_hash(tmp_path, "kit.agent") != before


@pytest.mark.parametrize(
    "statement",
    [
        "import tools_of_mine",
        "from tools_of_mine import x",
        "def f():\n    import tools_of_mine.inner",
    ],
)
def test_what_an_agents_file_imports_counts(tmp_path, outside, statement):
    outside(
        {"lone_agent.py": f"import json, torch\n{statement}\n", "tools_of_mine/__init__.py": ""}
    )
    outside(
        {"tools_of_mine/inner.py": "import far_helper\n", "far_helper.py": "", "unrelated.py": ""}
    )
    before = agent_hash(tmp_path, "lone_agent")
    outside({"unrelated.py": "# other\n"})
    assert agent_hash(tmp_path, "lone_agent") == before
    outside({"far_helper.py": "# other\n"})
    assert agent_hash(tmp_path, "lone_agent") != before


def test_relative_imports_and_folders_without_init_are_followed(outside):
    folder = outside({"plain/agent.py": "from . import near\nfrom plain.other import x\n"})
    outside({"plain/near.py": "", "plain/other.py": "", "plain/apart.py": ""})
    files, folders = module_files("plain.agent")
    assert sorted(files) == ["plain/agent.py", "plain/near.py", "plain/other.py"]
    assert folders == {str(folder)}


def test_no_code_of_the_agent_runs_at_submit(tmp_path, outside):
    outside(
        {"loud/__init__.py": "raise SystemExit('ran')", "loud/agent.py": "raise SystemExit('ran')"}
    )
    assert agent_hash(tmp_path, "loud.agent") is not None


def test_an_arms_own_trainer_counts_for_its_own_runs(tmp_path, outside):
    outside({"own_trainer.py": "class Backend: ...\n"})
    path = write(tmp_path, "{backend: fsdp2}", "{backend: 'own_trainer:Backend'}")

    def identities() -> dict[tuple[str, int], str]:
        expansion = expand(load(path), "here", tmp_path / "runs", base=tmp_path, write=False)
        return {(run.system, run.seed): run.identity for run in expansion.runs}

    before = identities()
    outside({"own_trainer.py": "class Backend: pass\n"})
    after = identities()
    differing = {run for run in before if before[run] != after[run]}
    assert differing == {("ours", 0), ("ours", 1), ("conformance", 0)}


def test_the_trainers_of_this_project_are_in_its_snapshot_already(tmp_path):
    backend = "harness.baselines.megatron_core:MegatronCoreBackend"
    config = configuration(tmp_path, "{backend: fsdp2}", f"{{backend: '{backend}'}}")
    assert trainer_inputs(config) == ()


def test_an_agent_that_is_not_there_is_found_before_anything_starts(tmp_path):
    path = write(tmp_path, "source: shapes", "source: shapes, agent: 'nowhere.agent:Agent'")
    expansion = expand(load(path), "here", tmp_path / "runs", base=tmp_path, write=False)
    assert any(
        "protocol.task.agent: no module nowhere.agent" in p
        for p in problems(expansion, cluster=True)
    )


def test_a_submitted_run_knows_its_files_and_finds_its_modules(tmp_path, outside):
    folder = outside({"lone_agent.py": "import far_helper\n", "far_helper.py": ""})
    (tmp_path / "rows.jsonl").write_text("{}\n")
    path = write(tmp_path, "source: shapes", "source: ./rows.jsonl, agent: 'lone_agent:Agent'")
    expansion = expand(load(path), "here", tmp_path / "runs", base=tmp_path)
    submit(expansion, expansion.runs)
    from harness.run_folder import RunFolder

    run = RunFolder(expansion.folder / expansion.replicates[0].name).run
    named = {Path(path).name for item in run["inputs"] for path in item["files"]}
    assert named == {"rows.jsonl", "lone_agent.py", "far_helper.py"}
    assert run["import_path"] == [str(folder)]
    assert changed(run["inputs"]) == ""


def test_an_edit_after_the_submit_ends_the_attempt_with_the_file(make_run, job_command, tmp_path):
    plugin = tmp_path / "loss.py"
    plugin.write_text("A = 1\n")
    folder = make_run()
    config = configuration(
        tmp_path, "  warmup:", f"  algorithm: {{plugins: ['{plugin}']}}\n  warmup:"
    )
    folder.update_run(
        inputs=[found.record() for found in protocol_inputs(config, Places(tmp_path))]
    )
    plugin.write_text("A = 2\n")
    assert subprocess.run(job_command(folder)).returncode == 1
    assert folder.end["reason"] == (
        f"CONFIG: algorithm.plugins[0]: {plugin} changed after the submit; put it back or submit again"
    )
    plugin.write_text("A = 1\n")
    assert subprocess.run(job_command(folder)).returncode == 0


def test_a_run_imports_from_where_the_submit_found_it(make_run, job_command, outside):
    folder = make_run(
        body="import found_by_path\nfor step in range(1, steps + 1):\n    record(step)\n"
    )
    place = outside({"found_by_path.py": ""})
    folder.update_run(import_path=[str(place)])
    assert subprocess.run(job_command(folder)).returncode == 0
    assert str(place) in sys.path  # of this test; a job has its own


# Places that a cluster's profile names


def test_a_named_place_is_found_by_the_run_and_is_no_part_of_its_identity(tmp_path):
    here = write(tmp_path, "{builtin: tiny-qwen3-vl-moe}", "{path: $models/small}")
    here.write_text(here.read_text().replace("  warmup: {steps: 3}\n", ""))
    made = []
    for cluster in ("one", "two"):
        weights = tmp_path / cluster / "small"
        weights.mkdir(parents=True)
        (weights / "model.safetensors").write_bytes(b"abc")
        paths = {"models": str(tmp_path / cluster)}
        runs = tmp_path / cluster / "runs"
        made.append(expand(load(here), "here", runs, base=tmp_path, paths=paths))
        submit(made[-1], made[-1].runs)
        folder = RunFolder(made[-1].folder / made[-1].replicates[0].name)
        assert str(weights) in folder.run["command"]
        assert folder.run["inputs"][0]["files"].keys() == {str(weights)}
        assert f"path: {weights}" in (folder.path / "config.yaml").read_text()
        assert [said for said in problems(made[-1], cluster=True) if "$models" in said] == []
    assert [run.identity for run in made[0].runs] == [run.identity for run in made[1].runs]


def test_a_place_that_the_profile_does_not_name_is_said_with_those_that_it_does(tmp_path):
    path = write(tmp_path, "source: shapes", "source: $dta/rows.jsonl")
    expansion = expand(
        load(path), "here", tmp_path / "runs", base=tmp_path, paths={"data": "/d"}, write=False
    )
    (said,) = [said for said in problems(expansion, cluster=True) if "task.source" in said]
    assert said.startswith("protocol.task.source: $dta/rows.jsonl: the cluster's profile has no")
    assert "(it has data)" in said
