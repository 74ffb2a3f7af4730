"""What goes on when it is asked to, and what is an outcome."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import typer
from typer.testing import CliRunner

from harness import retry
from harness.queue import ask
from harness.retry import choose, mark, restart
from harness.run_folder import RunFolder, hold, is_held, write_json
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
    mark(folder, status("OOM"))
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
