"""Submitting writes everything down first, and starts what is missing, once."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from analysis.plan import Plan
from harness.cluster import Cluster
from harness.command import own_command
from harness.expand import expand
from harness.processes import own_environment
from harness.run_folder import RunFolder, read_json, write_json
from harness.slurm import job_ids
from harness.spec import load
from harness.submit import changes, run_on_slurm, sort_out, submit
from tests.harness.test_spec import write

pytestmark = pytest.mark.usefixtures("own_cores")


@pytest.fixture
def expansion(tmp_path):
    return expand(load(write(tmp_path)), "here", tmp_path / "runs", base=tmp_path)


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
