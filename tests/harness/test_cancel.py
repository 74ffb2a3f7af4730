"""Cancelling ends the processes, keeps the folders, and leaves others alone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from harness.cancel import CannotStop, cancel, stop_holder
from harness.processes import own_environment
from harness.queue import ask
from harness.run_folder import hold, is_held, read_json
from harness.run_status import queue_lock, read_status
from tests.harness.test_job import is_alive, until
from tests.harness.test_queue import in_scale, queue_process

pytestmark = pytest.mark.usefixtures("own_cores")

LATE = """
import sys, time
from pathlib import Path
from harness import run_folder
def late(pid, own=run_folder.process_started):
    time.sleep(0.5)  # the lock is taken, and what it says is still nothing
    return own(pid)
run_folder.process_started = late
with run_folder.hold(Path(sys.argv[1])):
    time.sleep(600)
"""
FOREVER = "beat('training', 1)\n(run / 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"


@pytest.fixture
def two_runs(make_run):
    """A queue at work on one of two endless runs (each takes all cores), and the pid of the first."""
    first, second = (make_run(f"molt-s{n}-00000000", FOREVER, cpus_per_node=1000) for n in (0, 1))
    names = [first.name, second.name]
    ask(in_scale(first), names, names)
    queue = queue_process(in_scale(first))
    until((first.path / "pid").exists)
    yield first, second, queue
    if queue.poll() is None:
        queue.terminate()
    queue.wait(30)


def test_cancel_ends_queue_and_runs_and_keeps_the_folders(two_runs):
    first, second, queue = two_runs
    pid = int(until((first.path / "pid").read_text))
    assert cancel(in_scale(first), None) == ([first.name], [second.name])
    assert queue.wait(10) == 0
    assert not is_alive(pid)
    assert not is_held(queue_lock(in_scale(first)))
    assert read_status(first).state == "KILLED"
    assert read_status(second).state == "PLANNED"
    assert second.attempts == []


def test_a_filter_stops_what_matches_and_the_queue_goes_on(two_runs):
    first, second, queue = two_runs
    assert cancel(in_scale(first), "s0") == ([first.name], [])
    until((second.path / "pid").exists)
    assert read_status(first).state == "KILLED"
    assert second.is_working() and queue.poll() is None


def test_a_waiting_run_is_withdrawn(two_runs):
    first, second, _ = two_runs
    assert cancel(in_scale(first), "s1") == ([], [second.name])
    assert first.is_working()
    assert second.name not in read_json(in_scale(first) / "queue.json")["work"]


def test_nothing_to_stop_is_no_error(make_run):
    folder = make_run()
    ask(in_scale(folder), [folder.name], [])
    command = [sys.executable, "-m", "harness.cancel", "--runs", str(in_scale(folder).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "nothing to stop" in done.stdout


def cancel_command(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "harness.cancel", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout or done.stderr


def test_the_name_of_an_experiment_stops_all_of_it(two_runs):
    first, second, queue = two_runs
    runs = str(in_scale(first).parents[1])
    code, said = cancel_command("experiment", "--runs", runs, "--json")
    assert code == 0
    assert json.loads(said) == {
        "experiment/tiny": {"stopped": [first.name], "waits_no_longer": [second.name]}
    }
    assert queue.wait(10) == 0


def test_a_filter_that_names_nothing_is_an_error(make_run):
    folder = make_run()
    ask(in_scale(folder), [folder.name], [])
    code, said = cancel_command("megatron", "--runs", str(in_scale(folder).parents[1]))
    assert code == 2
    assert said == "megatron: no experiment and no part of a run's name; there is experiment/tiny\n"


def test_a_process_of_another_machine_is_not_signalled(tmp_path):
    lock = tmp_path / "run" / "lock"
    with hold(lock):
        lock.write_text('{"pid": 1, "host": "elsewhere"}')
        with pytest.raises(CannotStop, match="on elsewhere; cancel it there"):
            stop_holder(lock)
    assert psutil.pid_exists(1)


def test_a_later_process_with_the_holders_number_is_not_signalled(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.cancel.WAIT_S", 0.3)
    lock = tmp_path / "run" / "lock"
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with hold(lock):  # by this process, which has not yet written its own name there
        about = {"pid": stranger.pid, "host": socket.gethostname(), "since": time.time() - 60}
        lock.write_text(json.dumps({**about, "process_started": 1}))
        with pytest.raises(CannotStop, match="a process that it does not name"):
            stop_holder(lock)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(tmp_path):
    lock = tmp_path / "run" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", LATE, str(lock)], env=own_environment())
    until(lambda: is_held(lock))
    assert stop_holder(lock)
    assert holder.wait(10) == -signal.SIGTERM
