"""The queue works what was asked for in order, on the cores there are, and survives what happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness.cores import take_cores
from harness.processes import own_environment
from harness.queue import Queue, ask, withdraw
from harness.run_folder import RunFolder, hold, is_held, write_json
from harness.run_status import queue_lock, read_status, read_statuses
from tests.harness.conftest import TRAIN
from tests.harness.test_job import is_alive, until

pytestmark = pytest.mark.usefixtures("own_cores")

ROOT = Path(__file__).resolve().parents[2]
FOREVER = "beat('training', 1)\n(run / 'pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"


def in_scale(folder: RunFolder) -> Path:
    return folder.path.parent


def test_the_queue_respects_needs_and_one_failure_stops_no_other(make_run):
    warmup = make_run(
        "warmup-00000000",
        "(run / 'checkpoint').mkdir(); "
        "(run / 'checkpoint' / 'warmup.json').write_text('{\"content_hash\": \"cafe\"}')",
        kind="warmup",
    )
    broken = make_run("molt-s0-00000000", "raise ValueError('x')", needs=(warmup.name,))
    whole = make_run("molt-s1-00000000", TRAIN, needs=(warmup.name,))
    names = [broken.name, whole.name, warmup.name]
    ask(in_scale(whole), names, names)
    Queue(in_scale(whole)).work()
    assert broken.end["state"] == "FAILED"
    assert whole.done is not None
    assert whole.run["warmup_content_hash"] == "cafe"


def test_a_failed_warm_up_stops_what_depends_on_it_with_the_reason(make_run):
    warmup = make_run("warmup-00000000", "sys.exit('no images')", kind="warmup")
    run = make_run("molt-s0-00000000", needs=(warmup.name,))
    ask(in_scale(run), [warmup.name, run.name], [warmup.name, run.name])
    Queue(in_scale(run)).work()
    assert run.end["reason"] == (
        "BLOCKED: needs warmup-00000000, which ended FAILED: exit code 1: no images"
    )


def test_arms_that_do_not_conform_lose_their_candidate_and_no_other(make_run):
    def conformance(name: str, passed: bool) -> RunFolder:
        figures = json.dumps({"passed": passed, "detail": "loss differs"})
        body = f"(run / 'conformance.json').write_text({figures!r})"
        return make_run(f"conformance-{name}-00000000", body, kind="conformance")

    good, bad = conformance("good", True), conformance("bad", False)
    kept, lost = (make_run(f"{c.name[12:-9]}-s0-00000000", needs=(c.name,)) for c in (good, bad))
    baseline = make_run("base-s0-00000000")
    names = [run.name for run in (bad, good, lost, kept, baseline)]
    ask(in_scale(kept), names, names)
    Queue(in_scale(kept)).work()
    assert kept.done is not None and baseline.done is not None
    assert lost.end["reason"].startswith(f"BLOCKED: {bad.name} found that the arms do not make")


def test_never_more_runs_than_the_machine_has_cores_for(make_run):
    body = """
here = list(run.parent.glob("*/working"))
(run / "working").touch()
time.sleep(0.6)
(run / "met").write_text(str(len(here)))
(run / "working").unlink()
record(steps)
"""
    every = len(os.sched_getaffinity(0))
    runs = [make_run(f"molt-s{n}-00000000", body, cpus_per_node=every) for n in range(3)]
    names = [run.name for run in runs]
    ask(in_scale(runs[0]), names, names)
    Queue(in_scale(runs[0])).work()
    assert [(run.path / "met").read_text() for run in runs] == ["0", "0", "0"]


def test_cores_are_shared_by_all_queues_of_a_user():
    every = len(os.sched_getaffinity(0))
    held = take_cores(every)
    assert take_cores(1) is None
    held.close()
    with take_cores(1000 * every):  # a run for a larger machine takes the whole of this one
        assert take_cores(1) is None


def test_cores_are_the_same_whatever_a_shell_calls_its_temporary_folder(monkeypatch, tmp_path):
    with take_cores(1000):
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert take_cores(1) is None
    with take_cores(1000) as held:  # a process that ends gives its cores back
        assert held is not None


def test_a_job_is_of_the_code_that_its_queue_began_with(make_run, monkeypatch):
    monkeypatch.chdir(ROOT)  # where `python -m` would find the working tree first
    body = """
import subprocess
parent = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\\0")
path = next(v for v in parent if v.startswith(b"PYTHONPATH=")).decode().partition("=")[2]
show = "import harness.job; print(harness.job.__file__)"
job = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
del job["MOLT_CODE"]  # the run's
print(subprocess.run([sys.executable, "-c", show], env=job, capture_output=True, text=True).stdout)
print(b"PYTHONSAFEPATH=1" in parent, "PYTHONSAFEPATH" in os.environ)
"""
    folder = make_run(body=body + TRAIN)
    ask(in_scale(folder), [folder.name], [folder.name])
    Queue(in_scale(folder)).work()
    imported, _, safe, *_ = (folder.attempts[0] / "output.log").read_text().splitlines()
    assert Path(imported).is_relative_to(in_scale(folder).parents[1] / ".code")
    assert safe == "True False"


def test_a_queue_inside_an_allocation_hides_it_from_its_runs(make_run, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "7")
    folder = make_run(body="print([k for k in os.environ if k.startswith('SLURM')])" + TRAIN)
    ask(in_scale(folder), [folder.name], [folder.name])
    Queue(in_scale(folder)).work()
    assert folder.done is not None
    assert (folder.attempts[0] / "output.log").read_text().splitlines()[0] == "[]"
    assert read_status(folder).job is None


TAKE = "import sys; from harness.cores import take_cores; held = take_cores(1); print(1, flush=True); sys.stdin.read()"


def test_a_run_that_waits_for_other_queues_cores_says_so(make_run):
    folder = make_run()
    ask(in_scale(folder), [folder.name], [folder.name])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with hold(queue_lock(in_scale(folder))):
        with take_cores(1):  # this process is the queue: its own cores keep it from nothing
            assert [status.why for status in read_statuses(in_scale(folder))] == [""]
        command = [sys.executable, "-c", TAKE]
        with subprocess.Popen(command, env=own_environment(), **pipes) as other:
            other.stdout.readline()
            (status,) = read_statuses(in_scale(folder))
            other.stdin.close()
    assert status.state == "WAITING"
    assert status.why.startswith("runs of other queues hold this machine's cores")


def test_looking_takes_a_tenth_of_a_core_at_most(make_run):
    folder = make_run(body=f"time.sleep(5){TRAIN}")
    ask(in_scale(folder), [folder.name], [folder.name])
    looks = []
    Queue(in_scale(folder)).work(lambda: (time.sleep(0.2), looks.append(time.monotonic())))
    between = [after - before for before, after in zip(looks, looks[1:])]
    assert between and min(between) >= 0.2 * 10


def test_a_run_is_attempted_once_for_each_time_it_is_asked_for(make_run):
    folder = make_run(body="sys.exit(1)")
    for attempts in (1, 2):
        ask(in_scale(folder), [folder.name], [folder.name])
        Queue(in_scale(folder)).work()
        assert len(folder.attempts) == attempts


def test_what_is_withdrawn_is_not_started(make_run):
    first, second = make_run("molt-s0-00000000"), make_run("molt-s1-00000000")
    names = [first.name, second.name]
    ask(in_scale(first), names, names)
    withdraw(in_scale(first), [first.name])
    Queue(in_scale(first)).work()
    assert first.attempts == [] and second.done is not None


def test_what_slurm_has_is_not_started_here_too(make_run):
    """Its job would try the run again, whatever the outcome here."""
    first, second = make_run("molt-s0-00000000"), make_run("molt-s1-00000000")
    names = [first.name, second.name]
    ask(in_scale(first), names, names)
    write_json(in_scale(first) / "slurm.json", {first.name: "7_0"})
    Queue(in_scale(first)).work()
    assert first.attempts == [] and second.done is not None


def queue_process(scale: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "harness.queue", str(scale)], env=own_environment()
    )


def start_stuck(make_run) -> tuple[RunFolder, subprocess.Popen, int]:
    """A queue whose run goes on for ever; the queue and the run's process."""
    folder = make_run(
        body=f"if attempt == 1:\n    {FOREVER.strip().replace(chr(10), chr(10) + '    ')}\n{TRAIN}"
    )
    ask(in_scale(folder), [folder.name], [folder.name])
    queue = queue_process(in_scale(folder))
    until((folder.path / "pid").exists)
    return folder, queue, int(until((folder.path / "pid").read_text))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_queue_that_ends_leaves_nothing_running_and_the_next_goes_on(make_run, number):
    folder, queue, pid = start_stuck(make_run)
    queue.send_signal(number)
    queue.wait(30)
    until(lambda: not is_alive(pid) and not folder.is_working())
    assert folder.end["state"] == "KILLED"
    ask(in_scale(folder), [folder.name], [folder.name])
    Queue(in_scale(folder)).work()
    assert folder.done["attempt"] == 2


def test_a_second_queue_leaves_the_work_to_the_first(make_run):
    folder, queue, _ = start_stuck(make_run)
    second = queue_process(in_scale(folder))
    assert second.wait(30) == 0
    assert len(folder.attempts) == 1
    assert is_held(queue_lock(in_scale(folder)))
    queue.terminate()
    queue.wait(30)


def test_a_run_that_is_added_while_the_queue_works_is_taken_on(make_run):
    first = make_run("molt-s0-00000000", "time.sleep(1.5)\nrecord(steps)\n")
    ask(in_scale(first), [first.name], [first.name])
    queue = queue_process(in_scale(first))
    until(lambda: first.attempts)
    second = make_run("molt-s1-00000000")
    ask(in_scale(first), [first.name, second.name], [second.name])
    queue.wait(30)
    assert first.done is not None and second.done is not None
