"""How runs stand with Slurm: what is absent from one answer is not gone, and what is gone does not stay unknown."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from harness import scheduler
from harness.queue import ask
from harness.retry import choose
from harness.run_folder import RunFolder, write_json
from harness.run_status import read_statuses
from harness.scheduler import SlurmError, parse_scontrol, task_numbers
from harness.slurm import live

WAITING_TASKS = (
    "JobId=7 ArrayJobId=7 ArrayTaskId={} ArrayTaskThrottle=1 JobName=x UserId=me(1) JobState={} "
    "Reason=JobHeldUser Dependency=(null) EndTime=Unknown ReqNodeList=(null) NodeList=\n"
)
"""As scontrol 22.05 shows the tasks of an array that have not started: one line."""


@pytest.fixture
def sent(make_run, lab):
    """Three runs that are tasks 0 to 2 of job 7, none started."""
    folders = [make_run(f"molt-s{number}-00000000") for number in range(3)]
    scale = folders[0].path.parent
    ask(scale, [folder.name for folder in folders], [])
    write_json(scale / "slurm.json", {folder.name: f"7_{n}" for n, folder in enumerate(folders)})
    return folders


def seen(folder: RunFolder) -> dict[str, tuple[str, str]]:
    """Task of the array -> (state, why)."""
    scheduler._asked.clear()
    statuses = read_statuses(folder.path.parent)
    return {status.run[6:7]: (status.state, status.why) for status in statuses}


def at(seconds_ago: float) -> str:
    """Slurm's way of saying when."""
    return datetime.fromtimestamp(time.time() - seconds_ago).strftime("%Y-%m-%dT%H:%M:%S")


def test_an_empty_answer_without_accounting_does_not_make_a_run_gone(sent, lab):
    (lab / "jobs").write_text(WAITING_TASKS.format("0-2%1", "PENDING"))
    assert {state for state, _ in seen(sent[0]).values()} == {"WAITING"}
    assert live(sent[0].path.parent, fresh=True) == {folder.name for folder in sent}


def test_where_slurmctld_says_nothing_of_the_job_nobody_knows(sent, lab):
    (lab / "jobs").write_text("\n")
    states = seen(sent[0])
    assert {state for state, _ in states.values()} == {"UNKNOWN"}
    assert "no word of job 7" in states["0"][1]
    with pytest.raises(SlurmError):  # so that no submit sends a second job
        live(sent[0].path.parent, fresh=True)


@pytest.mark.parametrize("row", ["", "7|CANCELLED|JobHeldUser||10:00|2026-11-30T04:06:14|x\n"])
def test_what_was_cancelled_before_it_started_is_killed_and_not_planned(sent, lab, row):
    """All tasks: Slurm keeps a line of the array without them, and after some minutes nothing."""
    (lab / "queued").write_text(row)
    if row:
        (lab / "jobs").write_text(WAITING_TASKS.format("4294967294", "CANCELLED"))
    found = seen(sent[0])
    assert {state for state, _ in found.values()} == {"KILLED"}
    assert found["1"][1].startswith("its job 7_1 was cancelled while it waited")


def test_a_task_cancelled_out_of_an_array_that_waits_is_killed_and_the_others_wait(sent, lab):
    (lab / "queued").write_text("".join(f"7_{n}|PENDING|||10:00|N/A|x\n" for n in (0, 2)))
    (lab / "jobs").write_text(WAITING_TASKS.format("0,2", "PENDING"))
    assert [state for state, _ in seen(sent[0]).values()] == ["WAITING", "KILLED", "WAITING"]


def test_what_slurm_cancelled_with_what_it_needs_stays_blocked_when_slurm_has_forgotten(
    make_run, lab
):
    need = make_run("warmup-00000000", kind="warmup")
    folder = make_run(needs=(need.name,))
    scale = folder.path.parent
    end = {"state": "FAILED", "reason": "FAILED: no paper", "duration_s": 1.0}
    write_json(need.path / "attempts" / "01" / "end.json", end)
    ask(scale, [need.name, folder.name], [])
    write_json(scale / "slurm.json", {folder.name: "8_0"})
    assert read_statuses(scale)[1].state == "BLOCKED"


def test_a_job_that_completed_without_a_record_is_an_accident_once_the_record_is_late(sent, lab):
    rows = [f"7_{n}|COMPLETED|None|node1|0:00|{at(ago)}|x\n" for n, ago in enumerate((5, 90, 90))]
    (lab / "queued").write_text("".join(rows))
    write_json(sent[2].path / "done.json", {"attempt": 1})
    found = seen(sent[0])
    assert [state for state, _ in found.values()] == ["UNKNOWN", "INFRA", "DONE"]
    assert "ended without a record on node1" in found["1"][1]
    choice = choose(read_statuses(sent[0].path.parent), None, force=False)
    assert choice.again == [sent[1].name]


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("", []),
        ("7", [7]),
        ("0,3-5%2", [0, 3, 4, 5]),
        ("0-8:4", [0, 4, 8]),
    ],
)
def test_task_numbers(text, tasks):
    assert task_numbers(text) == tasks


def test_scontrol_speaks_of_tasks_and_of_jobs():
    text = WAITING_TASKS.format("1-2%1", "PENDING") + (
        "JobId=9 ArrayJobId=7 ArrayTaskId=0 JobState=RUNNING Reason=None NodeList=node1\n"
        "JobId=12 JobName=single JobState=COMPLETED Reason=None NodeList=node[1-2]\n"
    )
    found = parse_scontrol(text)
    assert {job_id: job.state for job_id, job in found.items()} == {
        "7_1": "PENDING",
        "7_2": "PENDING",
        "7_0": "RUNNING",
        "12": "COMPLETED",
    }
    assert (found["7_1"].reason, found["7_0"].nodes) == ("JobHeldUser", "node1")
