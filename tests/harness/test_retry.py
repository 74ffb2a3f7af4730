"""What goes on when it is asked to, and what is an outcome."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness import retry
from harness.experiment_file import Resources
from harness.queue import ask
from harness.retry import choose, mark, restart
from harness.run_folder import RunFolder, hold, is_held, read_json, write_json
from harness.run_status import RunStatus, queue_lock, read_statuses
from tests.harness.test_job import until


def status(state: str, name: str = "molt-s0-1") -> RunStatus:
    return RunStatus(run=name, kind="train", system="molt", seed=0, state=state, why="x", attempt=1)


@pytest.mark.parametrize(
    "state", ["KILLED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "INFRA", "CONFIG"]
)
def test_what_infrastructure_ended_goes_on(state):
    assert choose([status(state)], None, force=False).again == ["molt-s0-1"]


@pytest.mark.parametrize("state", ["DIVERGED", "OOM", "HANG", "FAILED", "EVERYTHING_DROPPED"])
def test_an_outcome_is_refused_and_goes_on_by_force_only(state):
    refused = choose([status(state)], None, force=False)
    assert refused.again == [] and refused.refused[0][0] == "molt-s0-1"
    forced = choose([status(state)], None, force=True)
    assert forced.forced == ["molt-s0-1"] and forced.refused == []


@pytest.mark.parametrize("state", ["DONE", "RUNNING", "WAITING", "PLANNED"])
def test_what_is_done_or_lives_is_never_touched(state):
    choice = choose([status(state)], None, force=True)
    assert (choice.again, choice.forced, choice.refused) == ([], [], [])


def test_what_nobody_knows_to_be_dead_is_refused_even_by_force():
    assert choose([status("UNKNOWN")], None, force=True).refused


def test_a_filter_chooses_by_name():
    two = [status("KILLED", "molt-s0-1"), status("KILLED", "megatron-s0-2")]
    assert choose(two, "megatron", force=False).again == ["megatron-s0-2"]


def test_a_forced_run_is_marked_for_the_report(make_run):
    folder = make_run()
    mark(folder, status("HANG"))
    mark(folder, replace(status("OOM"), attempt=2))
    mark(folder, replace(status("OOM"), attempt=2))  # the first time it was not taken, or cancelled
    assert [entry["state"] for entry in folder.run["forced"]] == ["HANG", "OOM"]


def test_a_killed_run_is_done_after_a_retry(make_run, own_cores, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # whatever Slurm this machine may have
    folder = make_run()
    scale = folder.path.parent
    ask(scale, [folder.name], [])
    write_json(
        folder.path / "attempts" / "01" / "end.json",
        {"state": "KILLED", "reason": "KILLED: x", "duration_s": 1.0},
    )
    restart(scale, [folder.name], f"sqlite:///{scale}/mlflow.db")
    until(lambda: RunFolder(folder.path).done is not None, 60)
    assert [len(folder.attempts), read_statuses(scale)[0].state] == [2, "DONE"]
    until(lambda: not is_held(queue_lock(scale)), 60)


def test_the_command_line_says_what_it_refuses(make_run):
    folder = make_run()
    ask(folder.path.parent, [folder.name], [])
    write_json(
        folder.path / "attempts" / "01" / "end.json",
        {"state": "DIVERGED", "reason": "DIVERGED: loss is nan", "duration_s": 1.0},
    )
    app = typer.Typer()
    app.command()(retry.main)
    result = CliRunner().invoke(app, ["--runs", str(folder.path.parents[2])])
    assert result.exit_code == 3
    assert f"{folder.name}: refused: DIVERGED is an outcome: loss is nan" in result.output


def test_two_retries_at_once_try_a_run_again_once(make_run, monkeypatch):
    """The first one's run has come to an outcome before the second has the lock."""
    folder = make_run()
    scale = folder.path.parent
    ask(scale, [folder.name], [])
    ending = {"state": "INFRA", "reason": "INFRA: x", "duration_s": 1.0}
    write_json(folder.path / "attempts" / "01" / "end.json", ending)

    @contextmanager
    def late(path, **about):
        outcome = {"state": "FAILED", "reason": "FAILED: own error", "duration_s": 1.0}
        write_json(folder.path / "attempts" / "02" / "end.json", outcome)
        with hold(path, **about):
            yield

    monkeypatch.setattr(retry, "hold", late)
    monkeypatch.setattr(retry, "start_detached", lambda *_: pytest.fail("it was started again"))
    app = typer.Typer()
    app.command()(retry.main)
    result = CliRunner().invoke(app, ["--runs", str(scale.parents[1])])
    assert result.exit_code == 3, result.output
    assert "refused: FAILED is an outcome: own error" in result.output


@pytest.fixture
def two_outcomes(make_run, lab):
    """Runs of one array each that diverged on a cluster; the second needs the first."""
    first = make_run("warmup-00000000", kind="warmup")
    second = make_run("molt-s0-00000000", needs=(first.name,))
    for folder in (first, second):
        start = {"time": 1.0, "slurm_array_job_id": "7", "slurm_array_task_id": "0"}
        write_json(folder.path / "attempts" / "01" / "start.json", start)
        ending = {"state": "DIVERGED", "reason": "DIVERGED: x", "duration_s": 1.0}
        write_json(folder.path / "attempts" / "01" / "end.json", ending)
        folder.update_run(resources=Resources().model_dump(mode="json"))
    scale = first.path.parent
    ask(scale, [first.name, second.name], [])
    write_json(scale / "slurm.json", {first.name: "7_0", second.name: "7_0"})
    (lab / "queued").write_text("7_0|COMPLETED|None|n1|0:15|2026-11-29T10:00:00|x\n")
    return first, second


def force(scale: Path, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(retry.main)
    result = CliRunner().invoke(app, [*arguments, "--force", "--runs", str(scale.parents[1])])
    return result.exit_code, result.output


def forced(*folders: RunFolder) -> list[list[str]]:
    return [[entry["state"] for entry in folder.run.get("forced", [])] for folder in folders]


def test_only_what_slurm_took_is_marked_as_forced(two_outcomes, lab):
    first, second = two_outcomes
    scale = first.path.parent
    (lab / "refuses").touch()
    code, shown = force(scale)
    assert code == 2 and "invalid partition" in shown
    assert forced(first, second) == [[], []]
    (lab / "refuses").unlink()
    code, shown = force(scale, second.name)
    assert f"not sent: it needs {first.name}" in shown
    assert forced(first, second) == [[], []]
    sbatch = lab / "sbatch"  # the second array is refused
    sbatch.write_text(f"{sbatch.read_text()}touch $LAB/refuses\n")
    assert force(scale)[0] == 2
    assert forced(first, second) == [["DIVERGED"], []]


def test_a_run_that_goes_on_here_is_slurms_no_longer(make_run, lab, monkeypatch):
    folder = make_run()
    scale = folder.path.parent
    ask(scale, [folder.name], [])
    write_json(scale / "slurm.json", {folder.name: "7_0", "molt-s1-00000000": "7_1"})
    monkeypatch.setattr(retry.shutil, "which", lambda name: None)
    monkeypatch.setattr(retry, "start_detached", lambda *_: None)
    restart(scale, [folder.name], "", [status("DIVERGED", folder.name)])
    assert read_json(scale / "slurm.json") == {"molt-s1-00000000": "7_1"}
    assert forced(folder) == [["DIVERGED"]]


LOST = {"state": "INFRA", "reason": "INFRA: x", "duration_s": 1.0}


def test_a_run_that_was_not_sent_is_not_said_to_go_on(make_run, monkeypatch):
    folder = make_run()
    ask(folder.path.parent, [folder.name], [folder.name])
    write_json(folder.new_attempt() / "end.json", LOST)
    how = "not sent: it needs warmup-1"
    monkeypatch.setattr(retry, "restart", lambda scale, names, *_: dict.fromkeys(names, how))
    app = typer.Typer()
    app.command()(retry.main)
    result = CliRunner().invoke(app, ["--runs", str(folder.path.parents[2])])
    assert result.output.strip() == f"{folder.name}: waits: {how}"
