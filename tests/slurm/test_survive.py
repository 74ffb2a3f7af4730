"""Faults, one by one, on a real Slurm: what happens to the run, and what a person reads."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from harness import scheduler
from harness.avoid import last_decision
from harness.cluster import Attempts
from harness.run_folder import RunFolder, read_json
from harness.run_status import read_statuses
from harness.slurm import cancel_jobs, job_ids
from slurm.local import cluster
from tests.slurm.conftest import LOCAL, run, send, settled, status_of, wait_until

STEPS = """
import signal
from pathlib import Path
state = run / "state"
first = int(state.read_text()) + 1 if state.exists() else 1
def save(*_):
    metrics = run / "metrics.jsonl"
    state.write_text(str(len(metrics.read_text().splitlines()) if metrics.exists() else 0))
    sys.exit(4)
signal.signal(signal.SIGUSR2, save)
beat("starting", first - 1)
for step in range(first, steps + 1):
    time.sleep(PACE)
    record(step, wall_s=PACE)
    beat("training", step)
"""
"""A run of steps that saves and stops when it is told to, and goes on from there."""


def slow(pace_s: float) -> str:
    return STEPS.replace("PACE", str(pace_s))


def only_train(light, train: str, profile=LOCAL, **options) -> tuple[RunFolder, object]:
    """One arm's one run at work, its needs done."""
    expansion = light(train=train, seeds="[0]", **options)
    name = next(r.name for r in expansion.replicates if r.system == "ours")
    send(expansion, profile, only=name)
    folder = RunFolder(expansion.folder / name)
    wait_until(lambda: (folder.heartbeat or {}).get("time_unix"), 60)
    return folder, expansion


def ends(folder: RunFolder) -> list[dict]:
    """Every attempt's end; a run is DONE a moment before its attempt writes that it ended."""

    def written():
        found = [read_json(attempt / "end.json") for attempt in folder.attempts]
        return found if all(found) else None

    return wait_until(written)


def steps_of(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


def test_a_preempted_run_saves_goes_back_and_ends_as_if_nothing_had_been(light, mlflow_says):
    low = LOCAL.model_copy(update={"partition": "low", "sbatch": {"nodelist": "node2"}})
    folder, expansion = only_train(light, slow(1.0), low)
    high = ["sbatch", "--parsable", "--partition=main", "--nodelist=node2", "--exclusive"]
    run(*high, "--output=/dev/null", "--wrap", "sleep 2")
    wait_until(lambda: folder.end)
    assert mlflow_says(folder) in ("SCHEDULED", "RUNNING")  # the same run goes on
    assert settled(expansion)[folder.name] == "DONE"
    assert mlflow_says(folder) == "FINISHED"
    first, last = ends(folder)
    assert first["state"] == "PREEMPTED"
    assert (
        "preempted on node2; back into the queue: preempted 1 of at most 50 times"
        in first["reason"]
    )
    assert last["state"] == "DONE"
    assert steps_of(folder) == [1, 2, 3, 4, 5]  # none lost, none twice


def test_a_run_over_its_time_limit_goes_on_in_its_next_attempt(light, mlflow_says):
    """Slurm's shortest limit is a minute, and it signals up to a minute early."""
    folder, expansion = only_train(
        light, slow(12), resources=", hang_after_s: 100", limit="00:01:00"
    )
    wait_until(lambda: folder.end, 120)
    assert mlflow_says(folder) in ("SCHEDULED", "RUNNING")
    assert settled(expansion, 240)[folder.name] == "DONE"
    assert mlflow_says(folder) == "FINISHED"
    found = ends(folder)
    assert [end["state"] for end in found] == ["TIMEOUT"] * (len(found) - 1) + ["DONE"]
    assert len(found) >= 2
    assert steps_of(folder) == sorted(set(steps_of(folder)))


def test_a_run_whose_node_lost_power_goes_on_elsewhere(light, mlflow_says):
    folder, expansion = only_train(light, slow(3.0))
    node = read_json(folder.attempts[0] / "start.json")["slurmd_nodename"]
    cluster.kill_node(node)
    try:
        # sacct says NODE_FAIL as soon as slurmctld has put the job back; nobody may call the run dead.
        seen, tracked = set(), set()

        def back():
            seen.add(status_of(expansion, folder.name).state)
            tracked.add(mlflow_says(folder))
            return len(folder.attempts) > 1

        wait_until(back, 120)
        assert seen <= {"RUNNING", "WAITING", "UNKNOWN"}
        assert tracked <= {"RUNNING", "SCHEDULED"}
    finally:
        cluster.start_node(node)
    assert settled(expansion, 90)[folder.name] == "DONE"
    assert mlflow_says(folder) == "FINISHED"
    first, last = ends(folder)
    assert first["state"] == "NODE_FAIL" and first["reason"] == f"NODE_FAIL: {node} failed"
    assert read_json(folder.attempts[1] / "start.json")["slurmd_nodename"] != node


def test_a_cancelled_run_is_killed_and_leaves_no_process(light, mlflow_says, tmp_path):
    daemon = tmp_path / "daemon"
    body = f"""
import subprocess
child = subprocess.Popen(["setsid", "sleep", "600"])
Path({str(daemon)!r}).write_text(str(child.pid))
""" + slow(1.0)
    folder, expansion = only_train(light, body)
    assert mlflow_says(folder) == "RUNNING"
    cancel_jobs(expansion.folder, [folder.name])
    assert settled(expansion)[folder.name] == "KILLED"
    assert mlflow_says(folder) == "KILLED"
    assert status_of(expansion, folder.name).why == "the job was told to end (SIGTERM)"
    assert not run("sh", "-c", "ps -eo args | grep '^setsid sleep 60[0]\\|^sleep 60[0]' || true")


def test_a_run_that_is_preempted_more_often_than_it_may_be_stays_out(light, mlflow_says):
    profile = LOCAL.model_copy(
        update={
            "partition": "low",
            "sbatch": {"nodelist": "node2"},
            "attempts": Attempts(preempted=0),
        }
    )
    folder, expansion = only_train(light, slow(1.0), profile)
    high = ["sbatch", "--parsable", "--partition=main", "--nodelist=node2", "--exclusive"]
    run(*high, "--output=/dev/null", "--wrap", "sleep 2")
    assert settled(expansion)[folder.name] == "PREEMPTED"
    assert mlflow_says(folder) == "KILLED"
    assert (
        "not put back into the queue: preempted 1 of at most 0 times" in ends(folder)[0]["reason"]
    )
    assert len(folder.attempts) == 1


def test_a_node_under_which_runs_fail_is_avoided(light):
    body = """
if os.uname().nodename == "node1":
    print("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    sys.exit(1)
""" + slow(0.1)
    first = LOCAL.model_copy(update={"sbatch": {"nodelist": None}, "bad_node_after": 1})
    expansion = light(train=body, seeds="[0]")
    name = next(r.name for r in expansion.replicates if r.system == "ours")
    folder = RunFolder(expansion.folder / name)
    send(expansion, first, only=name)
    assert settled(expansion, 90)[name] == "DONE"
    states = [end["state"] for end in ends(folder)]
    nodes = [read_json(a / "start.json")["slurmd_nodename"] for a in folder.attempts]
    assert nodes[0] == "node1" and states == ["INFRA", "DONE"] and nodes[1] != "node1"


def test_runs_that_wait_learn_of_a_bad_node_before_it_draws_them(light):
    """It fails at once and is free soon: without that word others of the array would meet it."""
    body = """
first, node = run.parent / "first", os.uname().nodename
if not first.exists():
    first.write_text(node)
if steps == 5 and first.read_text() == node:
    print("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    sys.exit(1)
""" + slow(0.1)
    expansion = light(train=body)
    send(expansion, LOCAL.model_copy(update={"max_running": 1, "bad_node_after": 1}))
    assert set(settled(expansion, 180).values()) == {"DONE"}
    bad = (expansion.folder / "first").read_text()
    last = expansion.replicates[-1].name
    assert len(RunFolder(expansion.folder / last).attempts) == 1
    assert scheduler.describe(job_ids(expansion.folder)[last])["ExcNodeList"] == bad
    (line,) = last_decision(expansion.folder).lines()
    assert line.startswith(f"Avoided: {bad}: ")


def test_a_hang_ends_the_job_with_the_stacks_of_every_process(light, mlflow_says):
    body = """
import multiprocessing
def deadlock():
    lock = multiprocessing.Lock()
    lock.acquire(); lock.acquire()
record(1, wall_s=0.1); beat("training", 1)
record(2, wall_s=0.1); beat("training", 2)
helper = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
helper.start()
deadlock()
"""
    folder, expansion = only_train(light, body, resources=", hang_after_s: 5")
    assert settled(expansion)[folder.name] == "HANG"
    assert mlflow_says(folder) == "FAILED"
    (end,) = ends(folder)
    assert (
        end["reason"].startswith("HANG: no progress for") and "training at step 2" in end["reason"]
    )
    stacks = [f.read_text() for f in (folder.attempts[0] / "stacks").glob("*.txt")]
    assert any("in deadlock" in text for text in stacks), stacks
    assert len([text for text in stacks if "most recent call first" in text]) >= 2


def test_a_run_that_takes_more_memory_than_its_job_has_is_out_of_memory(light, mlflow_says):
    """The kernel kills by Slurm's control group, as on a cluster."""
    if "cgroup" not in (cluster.LAB / "slurm.conf").read_text():
        pytest.skip(f"No limit of memory: {cluster.GROUPS} cannot be written here")
    little = LOCAL.model_copy(update={"sbatch": {"mem": "300M"}})
    body = """
hoard = []
beat("training", 1)
while True:
    hoard.append(b"x" * (1 << 20))
"""
    folder, expansion = only_train(light, body, little)
    assert settled(expansion)[folder.name] == "OOM"
    assert folder.end["reason"].startswith("OOM: the kernel killed for memory on this node")
    assert mlflow_says(folder) == "FAILED"
    job = job_ids(expansion.folder)[folder.name]
    asked = ["sacct", f"--jobs={job}", "--allocations", "--noheader", "--format=State%20"]
    assert wait_until(lambda: run(*asked)) == "OUT_OF_MEMORY"


def test_a_scheduler_that_does_not_answer_makes_nobody_dead_and_costs_no_place(light, tmp_path):
    """slurmctld stands still, also when the run asks to go back, and goes on after that has timed out (10 s)."""
    go = tmp_path / "go"
    body = f"""
beat("training", attempt)
while attempt == 1:
    if os.path.exists({str(go)!r}):
        print("OSError: [Errno 28] No space left on device")
        sys.exit(1)
    time.sleep(0.1)
""" + slow(0.1)
    folder, expansion = only_train(light, body)
    controller = int((cluster.LAB / "run" / "slurmctld.started").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        states = {s.run: s for s in read_statuses(expansion.folder)}
        assert states[folder.name].state == "RUNNING"  # its lock is held: no need to ask
        go.touch()
        wait_until(lambda: folder.end)
        time.sleep(12)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert settled(expansion, 90)[folder.name] == "DONE"
    assert [end["state"] for end in ends(folder)] == ["INFRA", "DONE"]
    facts = scheduler.describe(job_ids(expansion.folder)[folder.name])
    assert facts["Restarts"] == "1"


def test_the_job_ids_of_an_array_are_its_tasks(light):
    expansion = light()
    ids = send(expansion)
    tasks = [ids[r.name] for r in expansion.replicates]
    array = tasks[0].partition("_")[0]
    assert tasks == [f"{array}_{number}" for number in range(len(tasks))]
    assert job_ids(expansion.folder) == ids
    settled(expansion)


def test_a_run_that_is_requeued_by_hand_goes_on(light):
    folder, expansion = only_train(light, slow(1.0))
    run("scontrol", "requeue", job_ids(expansion.folder)[folder.name])
    assert settled(expansion, 90)[folder.name] == "DONE"
    assert [end["state"] for end in ends(folder)] == ["KILLED", "DONE"]


def test_a_job_that_is_killed_outright_is_dead_only_when_slurm_says_so(light, mlflow_says):
    """Nothing is written, and the account is Slurm's."""
    body = """
beat("starting", 0)
time.sleep(3)
os.kill(os.getppid(), 9)
time.sleep(600)
"""
    folder, expansion = only_train(light, body)
    assert mlflow_says(folder) == "RUNNING"
    assert settled(expansion)[folder.name] == "KILLED"
    assert mlflow_says(folder) == "KILLED"  # nobody was there to say so: the pass itself repairs it
    assert [read_json(attempt / "end.json") for attempt in folder.attempts] == [None]
    assert "before it could write why" in status_of(expansion, folder.name).why
