"""Submitting writes everything down first, and starts what is missing, once."""

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

from analysis.plan import Plan
from harness import submit as submit_module
from harness.cluster import Cluster
from harness.command import own_command
from harness.container import Image
from harness.expand import expand
from harness.processes import own_environment
from harness.run_folder import RunFolder, read_json, write_json
from harness.run_status import read_statuses
from harness.scheduler import SlurmError
from harness.slurm import job_ids
from harness.spec import load
from harness.submit import changes, choose_scale, run_on_slurm, sort_out, submit
from tests.harness.test_spec import write

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


def attempt(folder: RunFolder, number: str, state: str, **start) -> None:
    """What an attempt that ended leaves; ``start``: the job of Slurm's that it was made by."""
    path = folder.path / "attempts" / number
    write_json(path / "start.json", {"time": 1.0, "host": "login", **start})
    write_json(path / "end.json", {"state": state, "reason": f"{state}: x", "duration_s": 1.0})


# What a submit writes


def test_a_submit_freezes_the_plan_and_describes_every_run(expansion):
    start, leave = submit(expansion, expansion.runs)
    assert Plan.load(expansion.folder / "plan.json").order == tuple(
        run.name for run in expansion.replicates
    )
    assert start == [run.name for run in expansion.runs] and leave == []
    run = RunFolder(expansion.folder / expansion.replicates[0].name).run
    assert run["identity"] == expansion.replicates[0].identity
    assert run["config"]["trainer"] == expansion.replicates[0].config.trainer.model_dump(
        mode="json"
    )
    assert (
        expansion.folder / expansion.replicates[0].name / run["code_path"] / "molt_core"
    ).is_dir()


def test_the_written_configuration_is_the_resolved_one(expansion):
    from molt_core.config import load_run_config

    submit(expansion, expansion.runs)
    run = expansion.replicates[-1]
    assert load_run_config(expansion.folder / run.name / "config.yaml") == run.config


def test_published_weights_are_the_recorded_start_where_there_is_no_warm_up(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"abc")
    path = write(tmp_path, "{builtin: tiny-qwen3-vl-moe}", "{path: weights}")
    path.write_text(path.read_text().replace("  warmup: {steps: 3}\n", ""))
    expansion = expand(load(path), "here", tmp_path / "runs", base=tmp_path)
    submit(expansion, expansion.runs)
    runs = [RunFolder(expansion.folder / run.name).run for run in expansion.replicates]
    assert len({run["warmup_content_hash"] for run in runs}) == 1
    assert str((tmp_path / "weights").resolve()) in runs[0]["command"]


def test_a_changed_margin_is_said_before_it_amends_the_plan(expansion, tmp_path):
    assert changes(expansion) == []
    submit(expansion, expansion.runs)
    assert changes(expansion) == []
    other = load(write(tmp_path, "margin: 0.05", "margin: 0.2"))
    assert changes(expand(other, "here", tmp_path / "runs", base=tmp_path)) == ["endpoints"]


def test_a_second_submit_rewrites_nothing(expansion):
    submit(expansion, expansion.runs)
    before = {p: p.read_bytes() for p in expansion.folder.rglob("*.json") if p.name != "queue.json"}
    submit(expansion, expansion.runs)
    assert {p: p.read_bytes() for p in before} == before


def test_limits_follow_the_newest_submit_until_the_run_is_done(expansion, tmp_path):
    submit(expansion, expansion.runs)
    done, open_ = expansion.replicates[:2]
    write_json(expansion.folder / done.name / "done.json", {"attempt": 1})
    limits = "{time_limit: 02:00:00, hang_after_s: 99}"
    later = load(write(tmp_path, "{time_limit: 00:30:00}", limits))
    again = expand(later, "here", tmp_path / "runs", base=tmp_path)
    assert [run.name for run in again.runs] == [run.name for run in expansion.runs]
    submit(again, again.runs)
    resources = RunFolder(expansion.folder / open_.name).run["resources"]
    assert (resources["time_limit_s"], resources["hang_after_s"]) == (7200, 99)
    assert RunFolder(expansion.folder / done.name).run["resources"]["time_limit_s"] == 1800


def test_a_submit_of_other_runs_forgets_no_earlier_one_that_still_waits(expansion, tmp_path):
    submit(expansion, expansion.runs)
    other = load(write(tmp_path, "eps: 1e-6", "eps: 1e-7"))
    later = expand(other, "here", tmp_path / "runs", base=tmp_path)
    submit(later, later.runs)
    queue = read_json(expansion.folder / "queue.json")
    assert queue["order"][: len(later.runs)] == [run.name for run in later.runs]
    left = [run.name for run in expansion.runs if run.kind != "warmup"]  # the warm-up is shared
    assert queue["order"][len(later.runs) :] == left
    assert set(left) <= set(queue["work"])


ASK = """
import sys
from pathlib import Path
from harness.queue import ask
sys.stdin.readline()
for number in range(40):
    name = f"{sys.argv[2]}-s{number}-00000000"
    ask(Path(sys.argv[1]), [name], [name])
"""


def test_two_submits_at_once_lose_no_ask(tmp_path):
    def asker(system: str) -> subprocess.Popen:
        command = [sys.executable, "-c", ASK, str(tmp_path), system]
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=own_environment(), text=True)

    both = [asker("ours"), asker("theirs")]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in both] == [0, 0]
    queue = read_json(tmp_path / "queue.json")
    names = {f"{system}-s{n}-00000000" for system in ("ours", "theirs") for n in range(40)}
    assert set(queue["work"]) == names
    assert sorted(queue["order"]) == sorted(names)


AMEND = """
import sys, time
from pathlib import Path
from analysis import plan
from harness.expand import expand
from harness.scheduler import SlurmError
from harness.spec import load
from harness.submit import submit
def slow(*arguments, write=plan._write_beside):  # as on a shared file system
    time.sleep(0.05)
    return write(*arguments)
plan._write_beside = slow
folder, tenths = Path(sys.argv[1]), sys.argv[2]
text = (folder / "small.yaml").read_text()
expansions = []
for last in range(1, 7):
    path = folder / f"small-{tenths}{last}.yaml"
    path.write_text(text.replace("margin: 0.05", f"margin: 0.{tenths}{last}"))
    expansions.append(expand(load(path), "here", folder / "runs", base=folder))
print("ready", flush=True)
sys.stdin.readline()
for expansion in expansions:
    submit(expansion, expansion.runs)
"""


def test_two_submits_at_once_lose_no_amendment_of_the_plan(expansion, tmp_path):
    submit(expansion, expansion.runs)

    def amender(tenths: str) -> subprocess.Popen:
        command = [sys.executable, "-c", AMEND, str(tmp_path), tenths]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, **pipes, env=own_environment(), text=True)

    both = [amender("1"), amender("2")]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(60) for process in both] == [0, 0]
    amendments = Plan.load(expansion.folder / "plan.json").amendments
    margins = [amendment.diff["endpoints.accuracy.margin"] for amendment in amendments]
    written = sorted(after for _, after in margins)
    assert written == [0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.21, 0.22, 0.23, 0.24, 0.25, 0.26]
    assert [before for before, _ in margins] == [0.05, *[after for _, after in margins[:-1]]]


def test_a_brace_in_a_models_path_is_a_brace(tmp_path):
    weights = tmp_path / "{run}" / "v{2}"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(b"abc")
    path = write(tmp_path, "{builtin: tiny-qwen3-vl-moe}", f"{{path: '{weights}'}}")
    path.write_text(path.read_text().replace("  warmup: {steps: 3}\n", ""))
    expansion = expand(load(path), "here", tmp_path / "runs", base=tmp_path)
    submit(expansion, expansion.runs)
    folder = RunFolder(expansion.folder / expansion.replicates[0].name)
    arguments = own_command(folder, folder.run, folder.path / "attempts" / "01", sys.executable)
    assert str(weights.resolve()) in arguments


@pytest.mark.parametrize(
    ("state", "starts"),
    [
        *((state, True) for state in ("KILLED", "CONFIG", "BLOCKED", "PREEMPTED", "NODE_FAIL")),
        *((state, False) for state in ("TIMEOUT", "INFRA", "FAILED", "OOM", "HANG", "DIVERGED")),
    ],
)
def test_interrupted_runs_go_on_and_outcomes_stand(expansion, state, starts):
    submit(expansion, expansion.runs)
    run = expansion.replicates[0]
    attempt = expansion.folder / run.name / "attempts" / "01"
    write_json(attempt / "end.json", {"state": state, "reason": f"{state}: x", "duration_s": 1.0})
    start, leave = sort_out(expansion.folder, [run])
    assert (start == [run.name]) is starts
    assert (run.name in dict(leave)) is not starts


def test_done_runs_are_left_alone(expansion):
    submit(expansion, expansion.runs)
    run = expansion.replicates[0]
    write_json(expansion.folder / run.name / "done.json", {"attempt": 1})
    start, leave = sort_out(expansion.folder, expansion.runs)
    assert run.name not in start
    assert dict(leave)[run.name] == "DONE"


def test_a_run_that_comes_to_an_outcome_while_a_submit_waits_is_not_started_again(expansion, lab):
    """Two submits at once: the first one's run has failed before the second has the lock."""
    start, _ = submit(expansion, expansion.runs)
    failed = expansion.warmup.name
    attempt = expansion.folder / failed / "attempts" / "01"
    write_json(attempt / "end.json", {"state": "FAILED", "reason": "FAILED: x", "duration_s": 1.0})
    console = Console(file=io.StringIO(), width=200)
    run_on_slurm(console, expansion, start, False, "", Cluster())
    assert failed not in job_ids(expansion.folder)
    assert f"{failed} is left: FAILED: x" in console.file.getvalue()


# The command line


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
