"""The command line of a submit: dry runs, refusals, where the runs go, and what is said of it."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness import submit as submit_module
from harness.cluster import Cluster
from harness.container import Image
from harness.expand import expand
from harness.run_folder import RunFolder, read_json, write_json
from harness.run_status import read_statuses
from harness.scheduler import SlurmError
from harness.slurm import job_ids
from harness.spec import load
from harness.submit import choose_scale, run_on_slurm, submit
from tests.harness.test_spec import write
from tests.harness.test_submit import attempt

pytestmark = pytest.mark.usefixtures("own_cores")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def expansion(tmp_path):
    return expand(load(write(tmp_path)), "here", tmp_path / "runs", base=tmp_path)


def command_line(*arguments: str) -> tuple[int, str]:
    import typer

    app = typer.Typer()
    app.command()(submit_module.main)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def slurm_is(here: bool, monkeypatch) -> None:
    """As `submit` sees it; whoever else looks for a program finds what there is."""
    found = SimpleNamespace(which=lambda name: f"/usr/bin/{name}" if here else None)
    monkeypatch.setattr(submit_module, "shutil", found)


def test_a_dry_run_shows_everything_and_writes_nothing(tmp_path):
    code, shown = command_line(
        str(write(tmp_path)), "--dry-run", "--runs", str(tmp_path / "runs"), "--scale", "here"
    )
    assert code == 0
    expansion = expand(
        load(tmp_path / "small.yaml"), "here", tmp_path / "runs", base=Path.cwd(), write=False
    )
    for text in ("world_size", "Nobody would notice less.", *(run.name for run in expansion.runs)):
        assert text in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.yaml"]


def test_a_dry_run_says_what_the_runs_can_show_before_they_are_paid(tmp_path):
    three = write(tmp_path, "seeds: [0, 1]", "seeds: [0, 1, 2]")
    _, shown = command_line(
        str(three), "--dry-run", "--runs", str(tmp_path / "runs"), "--scale", "here"
    )
    said = " ".join(shown.split())
    assert "What 3 runs a side can show" in said
    assert "accuracy: 3 runs a side can show EQUIVALENT within ±0.05 share" in said


def test_the_clusters_scale_dry_runs_without_a_cluster(tmp_path):
    code, shown = command_line(
        str(ROOT / "experiments" / "moe_vl.yaml"),
        "--dry-run",
        "--scale",
        "h100x16",
        "--runs",
        str(tmp_path / "runs"),
    )
    assert code == 0
    assert "Qwen/Qwen3-VL-30B-A3B-Instruct" in shown
    assert "2 nodes x 8 cuda" in shown
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_without_a_cluster_has_the_images_identities_or_says_that_it_has_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(submit_module.shutil, "which", lambda name: None)  # no sbatch here
    file, profile = tmp_path / "a.sif", tmp_path / "there.yaml"
    profile.write_text(f"container: {{runtime: apptainer, image: {file}}}\n")
    where = ["--scale", "here", "--runs", str(tmp_path / "runs")]
    arguments = [str(write(tmp_path)), "--dry-run", *where, "--cluster", str(profile)]
    code, shown = command_line(*arguments)
    assert code == 0 and "those of runs without an image" in " ".join(shown.split())
    file.write_text("image")
    code, shown = command_line(*arguments)
    sha256 = hashlib.sha256(b"image").hexdigest()
    expansion = expand(
        load(tmp_path / "small.yaml"),
        "here",
        tmp_path / "runs",
        base=Path.cwd(),
        write=False,
        image=Image(str(file), sha256),
    )
    assert code == 0 and all(run.name in shown for run in expansion.runs)


def test_a_mistake_stops_before_anything_is_written(tmp_path):
    path = write(tmp_path, "    margin: 0.05\n", "")
    code, shown = command_line(str(path), "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert "endpoints[0].margin: is missing" in shown
    assert not (tmp_path / "runs").exists()


def test_a_refusal_is_an_object_for_machines(tmp_path):
    path = write(tmp_path, "    margin: 0.05\n", "")
    command = [sys.executable, "-m", "harness.submit", str(path), "--json"]
    done = subprocess.run(
        [*command, "--runs", str(tmp_path / "runs")], capture_output=True, text=True
    )
    assert done.returncode == 2
    said = json.loads(done.stdout)["refused"]
    assert "endpoints[0].margin: is missing" in said[0] and said[-1].endswith(
        "nothing was started."
    )


def test_a_scale_that_does_not_fit_here_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(submit_module.shutil, "which", lambda name: None)
    path = write(tmp_path, "  there:", "  there:\n    resources: {nodes: 2}")
    code, shown = command_line(str(path), "--scale", "there", "--runs", str(tmp_path / "runs"))
    assert code == 2
    assert "no Slurm here" in shown and "--scale here" in shown


def test_local_works_the_runs_here_where_there_is_slurm(tmp_path, monkeypatch):
    slurm_is(True, monkeypatch)
    monkeypatch.setattr(submit_module, "run_here", lambda *_: 0)
    monkeypatch.setattr(submit_module.preflight, "problems", lambda *_, **__: [])
    arguments = [str(write(tmp_path)), "--scale", "here", "--runs", str(tmp_path / "runs")]
    code, shown = command_line(*arguments, "--local")
    assert code == 0, shown
    assert "6 to run" in shown


def test_an_outcome_met_here_stands_whatever_became_of_an_earlier_job_of_slurms(
    tmp_path, monkeypatch, lab
):
    monkeypatch.setattr(submit_module, "run_here", lambda *_: 0)
    monkeypatch.setattr(submit_module.preflight, "problems", lambda *_, **__: [])
    arguments = [str(write(tmp_path)), "--scale", "here", "--runs", str(tmp_path / "runs")]
    command_line(*arguments, "--local")
    (queue,) = (tmp_path / "runs").glob("*/here/queue.json")
    folder = RunFolder(queue.parent / read_json(queue)["order"][-1])
    write_json(queue.with_name("slurm.json"), {folder.name: "77_0"})
    (lab / "queued").write_text("77_0|CANCELLED|None|n1|0:15|2026-11-29T10:00:00|x\n")
    attempt(folder, "01", "KILLED", slurm_array_job_id="77", slurm_array_task_id="0")
    code, shown = command_line(*arguments, "--local")
    assert code == 0 and "6 to run" in shown
    attempt(folder, "02", "DIVERGED")
    (status,) = (s for s in read_statuses(folder.path.parent) if s.run == folder.name)
    assert (status.state, status.why, status.job) == ("DIVERGED", "x", None)
    code, shown = command_line(*arguments, "--local")
    assert "5 to run" in shown


def test_what_slurm_has_is_left_to_it_by_a_submit_of_other_runs_here(expansion, lab):
    start, _ = submit(expansion, expansion.runs)
    run_on_slurm(Console(file=io.StringIO()), expansion, start, False, "", Cluster())
    sent = job_ids(expansion.folder)
    assert submit(expansion, expansion.runs, here=True)[0] == []
    assert set(start) == set(sent) and job_ids(expansion.folder) == sent


def test_the_default_scale_is_for_machines_without_slurm(tmp_path):
    experiment = load(write(tmp_path))
    assert choose_scale(experiment, None, cluster=False) == "here"
    assert choose_scale(experiment, "there", cluster=False) == "there"
    with pytest.raises(ValueError, match="give --scale"):
        choose_scale(experiment, None, cluster=True)
    with pytest.raises(ValueError, match="has here, there"):
        choose_scale(experiment, "everywhere", cluster=False)


def test_json_names_what_was_started(tmp_path, monkeypatch):
    slurm_is(False, monkeypatch)
    monkeypatch.setattr(submit_module, "run_here", lambda *_: 0)
    monkeypatch.setattr(submit_module.preflight, "problems", lambda *_, **__: [])
    code, shown = command_line(
        str(write(tmp_path)), "--scale", "here", "--runs", str(tmp_path / "runs"), "--json"
    )
    assert code == 0
    data = json.loads(next(line for line in shown.splitlines() if line.startswith("{")))
    assert len(data["start"]) == 6
    assert Path(data["folder"]).is_dir()


def test_a_slurm_that_does_not_answer_the_look_is_no_refusal(expansion, monkeypatch):
    def silent(*_):
        raise SlurmError("sbatch: timed out after 60 s")

    monkeypatch.setattr(submit_module.nodes, "look", silent)
    shown = Console(file=io.StringIO(), width=200)
    submit_module.look_at_a_node(shown, expansion, expansion.runs, Cluster(), as_json=False)
    assert (
        "Not checked" in shown.file.getvalue() and "timed out after 60 s" in shown.file.getvalue()
    )
