"""A job ends in one word, leaves no process, and writes done.json for success alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from harness import job as job_module
from harness import requeue
from harness.job import hang_bound
from harness.processes import dump_stacks, own_environment
from harness.run_folder import Busy, hold, is_held, read_json, write_json

DAEMON = """
import subprocess
# a grandchild that leaves its session and its parent, as daemons do
subprocess.Popen([sys.executable, "-c",
    "import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    if os.fork() == 0:\\n"
    "        open(os.environ['MARKER'], 'w').write(str(os.getpid()))\\n        time.sleep(600)"
]).wait()
while not os.path.exists(os.environ["MARKER"]) or not open(os.environ["MARKER"]).read():
    time.sleep(0.01)
"""
FOREVER = "beat('training', 1)\nwhile True: time.sleep(0.05)\n"


def work(command) -> int:
    return subprocess.run(command, capture_output=True, timeout=60).returncode


def until(condition, seconds: float = 20.0):
    """Wait for ``condition()``; fails the test where it never comes true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_success_is_done_json_with_the_hash_of_the_metrics(make_run, job_command):
    folder = make_run(steps=12)
    assert work(job_command(folder)) == 0
    assert folder.done["metrics_sha256"] == hashlib.sha256(folder.metrics.read_bytes()).hexdigest()
    assert folder.done["summary"]["reward_mean_last10"] == pytest.approx(sum(range(3, 13)) / 120)
    assert folder.end["state"] == "DONE"


def test_a_fault_of_the_job_itself_is_recorded(make_run, job_command):
    folder = make_run()
    folder.update_run(command=["{python}", "{nobody_knows}"])
    assert work(job_command(folder)) == 1
    assert folder.end["reason"].startswith("FAILED: the job failed: KeyError")


def test_conformance_that_found_no_number_still_ends_as_done_and_not_passed(make_run, job_command):
    figures = '{"passed": false, "detail": "loss", "loss_difference": null}'
    body = f"(run / 'conformance.json').write_text({figures!r})"
    folder = make_run("conformance-molt-00000000", body, kind="conformance")
    assert work(job_command(folder)) == 0
    assert folder.done["conformance"]["passed"] is False and folder.done["summary"] == {}


def test_no_progress_is_a_hang_and_its_stacks_are_in_the_log(make_run, job_command):
    folder = make_run(body="def stuck():\n    time.sleep(600)\nstuck()\n", hang_after_s=1.0)
    work(job_command(folder))
    assert folder.end["state"] == "HANG"
    assert "in stuck" in (folder.attempts[-1] / "output.log").read_text()


BECOMES = """
import os
from molt_core import _process
_process.begin()
os.execvp("sleep", ["sleep", "600"])
"""


def test_a_process_that_became_another_program_is_not_asked_for_stacks_which_would_end_it(tmp_path):
    """A launcher in Python that turns into srun, whose step would go with it."""
    own = {**own_environment(), "MOLT_STACKS": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", BECOMES], env=own) as other:
        try:
            until(lambda: psutil.Process(other.pid).name() == "sleep")
            assert (tmp_path / f"{other.pid}.txt").exists()
            assert dump_stacks(tmp_path, "no run's", patience_s=0) == []
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(0.3)
        finally:
            other.kill()


def test_a_beating_heart_is_no_hang(make_run, job_command):
    body = "for step in range(1, steps + 1):\n    record(step); beat('training', step); time.sleep(0.8)\n"
    folder = make_run(body=body, steps=4, hang_after_s=2.0)
    assert work(job_command(folder)) == 0


@pytest.mark.parametrize(
    ("steps", "wall_s", "phase", "bound"),
    [
        (9, 10.0, "training", 3600.0),  # too few to say what is usual
        (10, 10.0, "training", 200.0),  # twenty usual steps
        (10, 0.1, "training", 120.0),  # and never less than two minutes
        (10, 1000.0, "training", 3600.0),  # nor more than was asked for
        (10, 2000.0, "training", 6000.0),  # but three of its own steps it may always take
        (10, 10.0, "evaluating", 3600.0),
    ],
)
def test_a_runs_own_steps_say_how_long_a_step_may_take(make_run, steps, wall_s, phase, bound):
    folder = make_run()
    attempt = folder.new_attempt()
    records = [{"step": n + 1, "attempt": 1, "wall_s": wall_s} for n in range(steps)]
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert hang_bound(folder, attempt, phase, 3600.0) == bound


def test_over_the_time_limit_is_a_timeout(make_run, job_command):
    folder = make_run(body=FOREVER, time_limit_s=1)
    work(job_command(folder))
    assert folder.end["state"] == "TIMEOUT"


@pytest.mark.parametrize("ending", ["record(steps)", "sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_its_job(make_run, job_command, tmp_path, monkeypatch, ending):
    marker = tmp_path / "daemon.pid"
    monkeypatch.setenv("MARKER", str(marker))
    folder = make_run(body=DAEMON + ending)
    work(job_command(folder))
    assert not is_alive(int(marker.read_text()))
    assert folder.end["ended_with_it"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_and_is_recorded(
    make_run, job_command, tmp_path, monkeypatch, number
):
    marker = tmp_path / "daemon.pid"
    monkeypatch.setenv("MARKER", str(marker))
    folder = make_run(body=DAEMON + FOREVER)
    job = subprocess.Popen(job_command(folder))
    until(lambda: (folder.heartbeat or {}).get("step") == 1)
    job.send_signal(number)
    assert job.wait(30) == 1
    assert folder.end["reason"] == f"KILLED: the job was told to end ({number.name})"
    assert not is_alive(int(marker.read_text()))


def test_a_job_killed_outright_takes_its_command_with_it_and_the_next_one_its_daemons(
    make_run, job_command, tmp_path, monkeypatch
):
    marker = tmp_path / "daemon.pid"
    monkeypatch.setenv("MARKER", str(marker))
    body = f"if attempt == 1:\n    {DAEMON.strip().replace(chr(10), chr(10) + '    ')}\n"
    body += "    (run / 'pid').write_text(str(os.getpid()))\n    time.sleep(600)\nrecord(steps)\n"
    folder = make_run(body=body)
    job = subprocess.Popen(job_command(folder))
    command = int(
        until(lambda: (folder.path / "pid").exists() and (folder.path / "pid").read_text())
    )
    job.kill()
    job.wait()
    until(lambda: not is_alive(command))
    assert not folder.is_working()
    assert folder.end is None
    assert work(job_command(folder)) == 0
    assert not is_alive(int(marker.read_text()))
    assert folder.done["attempt"] == 2


@pytest.mark.parametrize(
    ("number", "nodes", "code", "reason", "state"),
    [
        (signal.SIGUSR2, 1, 3, "DIVERGED", "DIVERGED"),
        (signal.SIGUSR2, 2, 3, "EVERYTHING_DROPPED", "EVERYTHING_DROPPED"),
        (signal.SIGTERM, 1, 3, "DIVERGED", "DIVERGED"),
        (signal.SIGUSR2, 1, 3, "ENGINE", "ENGINE"),
        (signal.SIGUSR2, 1, 1, None, "FAILED"),
        (signal.SIGUSR2, 1, 3, "INFRA", "TIMEOUT"),  # no outcome
        (signal.SIGTERM, 1, 3, "ENGINE", "TIMEOUT"),  # the engine was signalled too
        (signal.SIGUSR2, 2, 3, "WORKER_DIED", "TIMEOUT"),  # or its node was lost meanwhile
        (signal.SIGUSR2, 1, 0, None, "TIMEOUT"),  # at no last step
        (signal.SIGUSR2, 1, 4, None, "TIMEOUT"),
        (signal.SIGUSR2, 1, -signal.SIGUSR2, None, "TIMEOUT"),
        (signal.SIGUSR2, 1, None, None, "TIMEOUT"),
    ],
)
def test_an_outcome_between_the_warning_and_the_end_is_no_time_out(
    make_run, monkeypatch, number, nodes, code, reason, state
):
    """It would go back into the queue, and draw other samples."""
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    told = requeue.Notice("TIMEOUT", "its time limit came near", 60.0)
    monkeypatch.setattr(requeue, "notice", lambda number, job_id: told)
    monkeypatch.setattr(job_module, "_stop", lambda *_: code)
    folder = make_run(nodes=nodes)
    attempt = folder.new_attempt()
    if reason is not None:
        write_json(attempt / "reason.json", {"reason": reason, "detail": "step 7"})
    assert job_module._told_to_end(number, None, folder, attempt).state == state


def test_a_command_that_went_first_of_those_that_were_signalled_was_told_to_end(make_run):
    """As Ray does it: a driver that gets SIGTERM exits with 15, which is no signal's code."""
    folder = make_run()
    attempt = folder.new_attempt()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with subprocess.Popen([sys.executable, "-c", "raise SystemExit(15)"]) as child:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # others do not block it
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            ending = job_module._watch(child, folder, folder.run, attempt)
    finally:
        signal.sigtimedwait([signal.SIGTERM], 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    assert (ending.state, ending.exit_code) == ("KILLED", 15)


def test_a_lock_is_one_holders_and_free_when_it_ends(tmp_path):
    path = tmp_path / "lock"
    with hold(path):
        assert is_held(path)
        with pytest.raises(Busy, match=str(os.getpid())), hold(path):
            pass
    assert not is_held(path)


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}


ORPHAN = """
import os, signal, sys, time
from pathlib import Path
from harness.processes import signalled_when_parent_dies
signal.signal(signal.SIGTERM, lambda *_: None)  # a queue's own handler, which a child inherits until it execs
parent = os.getpid()
if os.fork() == 0:
    Path(sys.argv[1]).write_text(str(os.getpid()))
    while os.getppid() == parent:  # the parent ends before the kernel is asked
        time.sleep(0.01)
    signalled_when_parent_dies(signal.SIGTERM, parent)
    Path(sys.argv[2]).touch()
    time.sleep(600)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_a_child_whose_parent_died_too_early_ends_all_the_same(tmp_path):
    pid, lived_on = tmp_path / "pid", tmp_path / "lived on"
    command = [sys.executable, "-c", ORPHAN, str(pid), str(lived_on)]
    subprocess.run(command, env=own_environment(), check=True)
    child = int(until(pid.read_text))
    try:
        until(lambda: not is_alive(child) or lived_on.exists())
        assert not lived_on.exists()
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)
