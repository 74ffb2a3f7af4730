"""Whether a run goes back into the queue, counted by reason, and which nodes it avoids."""

from __future__ import annotations

import pytest

from harness.cluster import Attempts
from harness.requeue import bad_nodes, ends_of_job, may_go_back, own_job
from harness.run_folder import write_json

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


def test_a_node_is_bad_when_runs_failed_on_it_and_not_when_they_were_preempted(make_run):
    for name, node, state in (
        ("molt-s0-1", "node1", "INFRA"),
        ("molt-s1-2", "node1", "NODE_FAIL"),
        ("molt-s2-3", "node2", "INFRA"),
        ("molt-s3-4", "node3", "PREEMPTED"),
        ("molt-s4-5", "node3", "PREEMPTED"),
        ("molt-s5-6", "node4", "FAILED"),
        ("molt-s6-7", "node4", "FAILED"),
    ):
        folder = make_run(name)
        attempt = folder.new_attempt()
        write_json(attempt / "start.json", {"slurmd_nodename": node})
        write_json(attempt / "end.json", {"state": state})
    assert bad_nodes(folder.path.parent, 2) == ["node1"]


def test_a_run_requeues_its_own_task_and_not_its_array(monkeypatch):
    for name, value in {"JOB_ID": "9", "ARRAY_JOB_ID": "5", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert own_job() == "5_3"
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    assert own_job() == "9"
