"""Whether a run goes back into the queue, counted by reason, and what becomes of it where Slurm does not answer."""

from __future__ import annotations

import signal

import pytest

from harness import requeue
from harness.cluster import Attempts
from harness.requeue import (
    close_attempts,
    ends_of_job,
    go_back,
    lost_its_place,
    may_go_back,
    own_job,
)
from harness.retry import choose
from harness.run_folder import hold, write_json
from harness.run_status import read_status
from harness.scheduler import SlurmError
from tests.harness.conftest import put_on_path

LIMITS = Attempts(preempted=2, timed_out=2, failed=1)


def ends(*states: str) -> list[dict]:
    """Attempts that each got ten steps further."""
    return [{"state": state, "step": 10 * (n + 1)} for n, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "goes_back"),
    [
        (["PREEMPTED"], True),
        (["PREEMPTED"] * 2, True),
        (["PREEMPTED"] * 3, False),
        (["NODE_FAIL"], True),
        (["NODE_FAIL", "INFRA"], False),
        (["PREEMPTED", "PREEMPTED", "TIMEOUT"], True),
        (["PREEMPTED", "TIMEOUT", "NODE_FAIL"], True),
        (["FAILED"], False),
        (["OOM"], False),
        (["HANG"], False),
        (["DIVERGED"], False),
        (["KILLED"], False),
        (["DONE"], False),
    ],
)
def test_three_counters_each_with_its_limit(states, goes_back):
    assert may_go_back(ends(*states), LIMITS)[0] is goes_back


def test_a_time_out_that_got_no_further_than_one_before_does_not_circle():
    twice = [{"state": "TIMEOUT", "step": 40}, {"state": "TIMEOUT", "step": 40}]
    back, words = may_go_back(twice, LIMITS)
    assert not back and "no further than step 40" in words


def test_attempts_of_an_earlier_job_do_not_count(make_run):
    folder = make_run()
    for job in ("5", "6", "6"):
        attempt = folder.new_attempt()
        write_json(attempt / "start.json", {"slurm_array_job_id": job, "slurm_array_task_id": "3"})
        write_json(attempt / "end.json", {"state": "NODE_FAIL"})
    assert len(ends_of_job(folder, "6_3")) == 2


@pytest.mark.parametrize(
    ("number", "facts", "state"),
    [
        (signal.SIGUSR2, {"TimeLimit": "00:01:00"}, "TIMEOUT"),
        (signal.SIGUSR2, {"PreemptTime": "2026-11-30T05:00:00"}, "PREEMPTED"),
        (signal.SIGTERM, {"PreemptTime": "2026-11-30T05:00:00"}, "PREEMPTED"),
        (signal.SIGTERM, {"Reason": "TimeLimit", "JobState": "COMPLETING"}, "TIMEOUT"),
        (signal.SIGTERM, {"Reason": "None", "JobState": "COMPLETING"}, "KILLED"),
    ],
)
def test_a_signal_means_what_slurmctld_says_of_the_job(monkeypatch, number, facts, state):
    """Also where the warning came before the job could hear it, and the end of its time is the first that it hears."""
    monkeypatch.setattr(requeue, "describe", lambda job_id: facts)
    assert requeue.notice(number, "7_0").state == state


def test_a_run_requeues_its_own_task_and_not_its_array(monkeypatch):
    for name, value in {"JOB_ID": "9", "ARRAY_JOB_ID": "5", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert own_job() == "5_3"
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    assert own_job() == "9"


@pytest.mark.parametrize(
    ("seen", "lost", "words"),
    [
        ("n1|down*\\nn1|down*\\nn2|mixed\\n", ["n1"], "n1 failed"),
        ("n1|idle\\nn2|mixed\\n", [], "one of n[1-2] failed"),  # it is back already
    ],
)
def test_of_several_nodes_the_one_that_is_down_has_failed_and_no_other_is_blamed(
    make_run, tmp_path, monkeypatch, seen, lost, words
):
    says = {"sacct": "NODE_FAIL|n[1-2]\\nRUNNING|n[3-4]\\n", "sinfo": seen}
    scripts = {name: f"#!/bin/sh\nprintf '{text}'\n" for name, text in says.items()}
    put_on_path(tmp_path, monkeypatch, **scripts)
    folder = make_run()
    write_json(folder.new_attempt() / "start.json", {"time": 1.0, "slurm_job_id": "5"})
    close_attempts(folder, "5")
    assert folder.end["reason"] == f"NODE_FAIL: {words}" and folder.end["lost_nodes"] == lost


SCONTROL = """#!/bin/sh
echo "$*" >> "$LAB/calls"
case "$*" in
*requeue*)
    [ -e "$LAB/gone" ] && { echo "scontrol: Unexpected message received for job 5_3" >&2; exit 1; }
    [ -e "$LAB/refuses" ] && { echo "slurm_requeue error: Access/permission denied" >&2; exit 1; }
    [ -e "$LAB/loses" ] || echo "JobState=PENDING Restarts=1" > "$LAB/job"
    [ -e "$LAB/answers" ] || { echo "slurm_requeue error: Socket timed out on send/recv operation" >&2; exit 1; } ;;
*show*)
    [ -e "$LAB/silent" ] && { echo "Unable to contact slurm controller" >&2; exit 1; }
    cat "$LAB/job" ;;
esac
[ -e "$LAB/once" ] && rm -f "$LAB/once" "$LAB/loses" || true
"""


@pytest.fixture
def controller(tmp_path, monkeypatch):
    """controller("loses", ...) -> what scontrol was asked, so far; by name what it does with a requeue."""
    put_on_path(tmp_path, monkeypatch, scontrol=SCONTROL)
    monkeypatch.setenv("LAB", str(tmp_path))
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(requeue, "PAUSE_S", 0.01)
    (tmp_path / "job").write_text("JobState=RUNNING Restarts=0\n")

    def does(*ways: str):
        for way in ways:
            (tmp_path / way).touch()
        return lambda: (tmp_path / "calls").read_text().splitlines()

    return does


def test_a_requeue_that_arrived_in_spite_of_a_time_out_is_not_sent_again(controller):
    asked = controller()
    go_back("5_3")
    assert asked() == ["requeue 5_3", "--oneliner show job 5_3"]


def test_a_requeue_that_was_lost_with_a_time_out_is_sent_again(controller):
    """The first is lost, and forgotten by the look at the job's state; the second arrives."""
    asked = controller("loses", "once")
    go_back("5_3")
    assert [call.split()[0] for call in asked()] == ["requeue", "--oneliner"] * 2


@pytest.mark.parametrize(
    ("ways", "tries", "words"),
    [
        (["loses", "silent"], 6, "timed out .*6 times"),
        (
            ["gone", "silent"],
            6,
            "Unexpected message .*6 times",
        ),  # of a controller that is not there
        (["refuses"], 2, "denied"),
    ],
)
def test_a_requeue_that_nobody_answers_is_sent_a_few_times_and_a_refused_one_twice(
    controller, ways, tries, words
):
    asked = controller(*ways)
    with pytest.raises(SlurmError, match=words):
        go_back("5_3")
    assert len([call for call in asked() if "requeue" in call]) == tries


def test_an_end_that_was_not_put_back_says_so_and_retry_goes_on(make_run):
    folder = make_run()
    attempt = folder.new_attempt()
    reason = "NODE_FAIL: node3 failed; back into the queue: failed 1 of at most 3 times"
    before = {"state": "NODE_FAIL", "reason": reason, "requeued": True, "duration_s": 1.0}
    write_json(attempt / "end.json", before)
    with hold(folder.lock):  # it went back after all, and its next attempt is at work
        lost_its_place(folder, attempt, "scontrol: timed out, 5 times")
        assert folder.end == before
    lost_its_place(folder, attempt, "scontrol: timed out, 5 times")
    assert folder.end["requeued"] is False
    assert folder.end["reason"] == (
        "NODE_FAIL: node3 failed; not put back into the queue: scontrol: timed out, 5 times"
    )
    assert choose([read_status(folder)], None, force=False).again == [folder.name]
