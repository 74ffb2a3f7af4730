"""Status is read from the folder alone, says what is true, and changes nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time

import pytest
from rich.console import Console

from harness import show
from harness.queue import ask
from harness.run_folder import hold, tail_records, write_json
from harness.run_status import RunStatus, queue_lock, read_status, read_statuses
from harness.table import duration, reasons, table
from tests.harness.conftest import TRAIN
from tests.harness.test_job import until

SLOW = """
for step in range(1, steps + 1):
    record(step, wall_s=0.5, reward_mean=0.25)
    beat("training", step)
    if step == 3:
        time.sleep(600)
"""


def test_before_during_and_after(make_run, job_command):
    folder = make_run(body=SLOW, steps=10)
    assert read_status(folder).state == "PLANNED"
    job = subprocess.Popen(job_command(folder))
    status = until(lambda: (s := read_status(folder)).step == 3 and s)
    assert (status.state, status.phase, status.steps, status.attempt) == (
        "RUNNING",
        "training",
        10,
        1,
    )
    assert status.left_s == pytest.approx(7 * 0.5)  # steps left x seconds a step
    job.terminate()
    job.wait(30)
    status = read_status(folder)
    assert (status.state, status.step) == ("KILLED", 3)
    assert "SIGTERM" in status.why


def test_a_job_killed_outright_is_killed_and_not_running(make_run, job_command):
    folder = make_run(body=SLOW, steps=10)
    job = subprocess.Popen(job_command(folder))
    until(lambda: read_status(folder).step == 3)
    job.kill()
    job.wait()
    status = read_status(folder)
    assert (status.state, status.why) == ("KILLED", "its job was killed without a word")


def test_the_heartbeat_of_an_earlier_attempt_is_not_this_ones(make_run, job_command):
    folder = make_run(body="time.sleep(600)", steps=10)
    write_json(
        folder.path / "heartbeat.json",
        {"phase": "training", "step": 9, "time_unix": time.time() - 60},
    )
    job = subprocess.Popen(job_command(folder))
    status = until(lambda: (s := read_status(folder)).state == "RUNNING" and s.elapsed_s and s)
    assert (status.phase, status.step) == ("starting", 0)
    job.terminate()
    job.wait(30)


def test_done_is_done_json_and_nothing_else(make_run):
    folder = make_run()
    write_json(folder.path / "heartbeat.json", {"phase": "finished", "step": 3, "time_unix": 0})
    assert read_status(folder).state == "PLANNED"
    write_json(folder.path / "done.json", {"attempt": 1, "summary": {"reward_mean_last10": 0.5}})
    status = read_status(folder)
    assert (status.state, status.reward_mean) == ("DONE", 0.5)


def test_a_run_that_is_done_took_its_time_before_its_attempt_has_ended(make_run):
    folder = make_run()
    attempt = folder.new_attempt()
    write_json(attempt / "start.json", {"time": 1000.0})
    write_json(folder.path / "done.json", {"attempt": 1, "finished": 1090.0})
    assert read_status(folder).elapsed_s == 90.0


def test_an_end_that_says_done_without_done_json_is_not_done(make_run, job_command):
    folder = make_run()
    subprocess.run(job_command(folder), check=True)
    (folder.path / "done.json").unlink()
    assert read_status(folder).state == "KILLED"


def test_a_run_waits_only_while_a_queue_lives(make_run):
    folder = make_run()
    scale = folder.path.parent
    ask(scale, [folder.name], [folder.name])
    assert [s.state for s in read_statuses(scale)] == ["PLANNED"]
    with hold(queue_lock(scale)):
        assert [s.state for s in read_statuses(scale)] == ["WAITING"]


def test_runs_are_listed_in_the_order_of_the_submit(make_run):
    names = ["molt-s1-00000000", "molt-s0-00000000", "warmup-00000000"]
    scale = [make_run(name) for name in names][0].path.parent
    ask(scale, names[::-1], [])
    assert [s.run for s in read_statuses(scale)] == names[::-1]


def test_runs_of_other_code_are_shown_when_asked_for(make_run):
    old, new = make_run("molt-s0-00000000"), make_run("molt-s0-11111111")
    scale = new.path.parent
    ask(scale, [new.name], [])
    assert [s.run for s in read_statuses(scale)] == [new.name]
    assert [s.run for s in read_statuses(scale, earlier=True)] == [new.name, old.name]


def test_the_command_line_prints_a_table_or_json(make_run):
    folder = make_run()
    scale = folder.path.parent
    ask(scale, [folder.name], [])
    command = [sys.executable, "-m", "harness.status", "--runs", str(scale.parents[1])]
    assert folder.name in subprocess.run(command, capture_output=True, text=True).stdout
    data = json.loads(subprocess.run([*command, "--json"], capture_output=True).stdout)
    assert data["experiment/tiny"][0]["state"] == "PLANNED"
    absent = subprocess.run([*command, "nothing"], capture_output=True, text=True)
    assert absent.returncode == 2
    assert "there is experiment/tiny" in absent.stderr and absent.stdout == ""


SQUEUE = "#!/bin/sh\necho 'slurm_load_jobs error: Socket timed out' >&2; exit 1\n"


@pytest.mark.parametrize(
    ("squeue", "says"), [(SQUEUE, "Socket timed out"), (None, "there is no squeue here")]
)
def test_a_scheduler_that_does_not_answer_makes_its_runs_unknown(
    make_run, tmp_path, monkeypatch, squeue, says
):
    folders = [make_run(f"molt-s{number}-00000000") for number in range(4)]
    scale = folders[0].path.parent
    names = [folder.name for folder in folders]
    ask(scale, names, [])
    write_json(scale / "slurm.json", {name: f"7_{n}" for n, name in enumerate(names[:3])})
    write_json(folders[0].path / "done.json", {"attempt": 1})
    tools = tmp_path / "tools"
    tools.mkdir()
    if squeue is not None:
        (tools / "squeue").write_text(squeue)
        (tools / "squeue").chmod(0o755)
    monkeypatch.setattr("harness.scheduler._asked", {})
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin" if squeue else str(tools))
    with hold(folders[1].lock):
        statuses = read_statuses(scale)
    assert [s.state for s in statuses] == ["DONE", "RUNNING", "UNKNOWN", "PLANNED"]
    assert says in statuses[2].why
    command = [sys.executable, "-m", "harness.status", "--runs", str(scale.parents[1])]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert says in shown.stdout


def test_runs_that_ended_for_one_reason_are_told_once(make_run):
    folders = [make_run(f"molt-s{number}-00000000") for number in range(3)]
    end = {"state": "BLOCKED", "reason": "BLOCKED: needs warmup", "duration_s": 0.0}
    for folder in folders:
        write_json(folder.path / "attempts" / "01" / "end.json", end)
    scale = folders[0].path.parent
    ask(scale, [folder.name for folder in folders], [])
    assert reasons(read_statuses(scale), scale) == [
        "molt-s0-00000000 and 2 more BLOCKED: needs warmup",
        f"    {scale}/molt-s0-00000000/attempts/01/output.log",
        "What to do: python -m harness.why RUN",
    ]


def test_the_table_fits_80_columns_and_keeps_names_and_states_whole():
    about = {"kind": "train", "seed": 0, "step": 61, "steps": 150, "reward_mean": 0.5, "attempt": 1}
    names = ["control-megatron-s0-00000000", "molt-s10-00000000"]
    statuses = [
        RunStatus(name, system="molt", state=state, phase="evaluating", left_s=3599.0, **about)
        for name, state in zip(names, ("RUNNING", "WAITING"))
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(statuses, "experiment/tiny"))
    lines = console.file.getvalue().splitlines()
    assert lines[1].split() == ["run", "state", "phase", "step", "reward", "took", "left"]
    for name, line in zip(names, lines[2:]):
        assert name in line and "evaluating" in line and "61/150" in line and "59:59" in line


def test_watch_ends_with_the_last_run(make_run, job_command):
    folder = make_run(body=f"time.sleep(1)\n{TRAIN}")
    scale = folder.path.parent
    ask(scale, [folder.name], [])
    job = subprocess.Popen(job_command(folder))
    until(folder.is_working)
    command = [sys.executable, "-m", "harness.status", "--watch", "--runs", str(scale.parents[1])]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert job.wait(30) == 0
    assert shown.stdout.splitlines()[-1].split()[:3] == ["molt-s0-00000000", "DONE", "3/3"]


@pytest.mark.parametrize("count", [3, 400])
def test_a_live_picture_shows_what_works_and_counts_what_does_not_fit(make_run, count):
    names = [f"molt-s{number:03d}-00000000" for number in range(count)]
    folders = [make_run(name) for name in names]
    scale = folders[0].path.parent
    ask(scale, names, [])
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    with hold(folders[-1].lock), show.board(console, scale) as draw:
        draw()
    shown = console.file.getvalue()
    assert names[-1] in shown
    assert (f"and {count - 20} planned" in shown) is (count > 20)


def test_the_tail_is_the_last_whole_records(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {n}, "pad": "{"x" * 50}"}}\n' for n in range(100)) + '{"step": 1'
    )
    assert [record["step"] for record in tail_records(path, 3)] == [97, 98, 99]
    small = [record["step"] for record in tail_records(path, 30, block=64)]
    assert small == list(range(70, 100))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (7.4, "7 s"), (65, "1:05"), (59.6, "1:00"), (7384, "2:03:04")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text
