"""What a job looks at before it starts its run's command, and why it may not: an attempt that ends there says so."""

from __future__ import annotations

import os
import signal
import subprocess

from harness.job import run_job
from harness.processes import leftovers
from harness.run_folder import RunFolder, read_json, write_json
from harness.scheduler import Job
from harness.standing import standing
from tests.harness.test_job import FOREVER, is_alive, until, work


def test_a_second_job_leaves_the_run_alone(make_run, job_command):
    folder = make_run(body=FOREVER)
    first = subprocess.Popen(job_command(folder))
    until(lambda: (folder.heartbeat or {}).get("step") == 1)
    try:
        assert work(job_command(folder)) == 75
        assert len(folder.attempts) == 1
    finally:
        first.terminate()
        first.wait(30)


def test_the_same_run_in_another_folder_is_left_alone(make_run, job_command, tmp_path):
    """An experiment that was submitted from two folders: the same identities on one node."""
    folder = make_run(body=FOREVER)
    other = RunFolder(tmp_path / "other" / "experiment" / "tiny" / folder.name)
    write_json(other.path / "run.json", {**folder.run, "code_path": str(tmp_path / "code")})
    first = subprocess.Popen(job_command(folder))
    until(lambda: (folder.heartbeat or {}).get("step") == 1)
    (command,) = leftovers(folder.mark)
    second = subprocess.Popen(job_command(other))
    try:
        until(lambda: (other.heartbeat or {}).get("step") == 1)
        second.terminate()
        second.wait(30)
        # The process itself: its job takes half a second to say that it is gone.
        assert is_alive(command.pid) and first.poll() is None and folder.end is None
    finally:
        first.terminate()
        first.wait(30)


def test_a_done_run_is_not_run_again(make_run, job_command):
    folder = make_run()
    work(job_command(folder))
    before = folder.metrics.read_bytes()
    assert work(job_command(folder)) == 0
    assert folder.metrics.read_bytes() == before
    assert len(folder.attempts) == 1


def test_a_failed_need_blocks_with_its_reason(make_run, job_command):
    need = make_run("warmup-00000000", "sys.exit('out of paper')", kind="warmup")
    folder = make_run(needs=(need.name,))
    work(job_command(need))
    assert work(job_command(folder)) == 1
    reason = "BLOCKED: needs warmup-00000000, which ended FAILED: exit code 1: out of paper"
    assert folder.end["reason"] == reason
    assert not folder.metrics.exists()


def test_arms_that_do_not_conform_are_not_run(make_run, job_command):
    body = '(run / \'conformance.json\').write_text(\'{"passed": false, "detail": "norms differ by 2"}\')'
    need = make_run("conformance-molt-00000000", body, kind="conformance")
    folder = make_run(needs=(need.name,))
    assert work(job_command(need)) == 0
    work(job_command(folder))
    assert folder.end["state"] == "BLOCKED"
    assert "norms differ by 2" in folder.end["reason"]


def test_what_the_needs_found_is_in_run_json(make_run, job_command):
    warmup = make_run(
        "warmup-00000000",
        "(run / 'checkpoint').mkdir(); "
        "(run / 'checkpoint' / 'warmup.json').write_text('{\"content_hash\": \"cafe\"}')",
        kind="warmup",
    )
    pair = make_run(
        "conformance-molt-00000000",
        "(run / 'conformance.json').write_text('{\"passed\": true, \"norm\": 1.5}')",
        kind="conformance",
    )
    folder = make_run(needs=(warmup.name, pair.name))
    for each in (warmup, pair, folder):
        assert work(job_command(each)) == 0
    assert folder.run["warmup_content_hash"] == "cafe"
    assert folder.run["conformance"] == {
        "passed": True,
        "pairs": {pair.name: {"passed": True, "norm": 1.5}},
    }
    assert set(folder.run["fingerprints"]) == {"code", "packages", "hardware"}


def test_the_command_sees_the_snapshot_first_and_not_the_working_tree(make_run, job_command):
    body = "print(sys.path[1], os.getcwd(), os.environ['MOLT_RUN'])\nrecord(steps)\n"
    folder = make_run(body=body)
    work(job_command(folder))
    path, cwd, mark = (folder.attempts[-1] / "output.log").read_text().split()
    assert os.path.samefile(path, folder.path / folder.run["code_path"])
    assert os.path.samefile(cwd, folder.attempts[-1])
    assert mark == folder.mark


def test_a_copy_of_the_code_that_was_edited_ends_the_attempt_before_it_starts(
    make_run, job_command
):
    folder = make_run()
    (folder.path / folder.run["code_path"] / "edited.py").write_text("")
    assert work(job_command(folder)) == 1
    assert (
        folder.end["state"] == "CONFIG" and "was changed after the submit" in folder.end["reason"]
    )
    assert not folder.metrics.exists()


def test_a_lost_copy_of_the_code_is_said(make_run, job_command):
    folder = make_run()
    write_json(folder.path / "run.json", {**folder.run, "code_path": "../gone"})
    work(job_command(folder))
    assert folder.end["state"] == "CONFIG"


def test_an_attempt_that_ends_before_its_command_starts_is_its_jobs_own_account(
    make_run, job_command, monkeypatch
):
    """Else Slurm's FAILED, and no reason, is all that is known of what the checks found."""
    task = {"JOB_ID": "78", "ARRAY_JOB_ID": "77", "ARRAY_TASK_ID": "0"}
    for name, value in (task | {"RESTART_COUNT": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    folder = make_run()
    (folder.path / folder.run["code_path"] / "edited.py").write_text("")
    assert work(job_command(folder)) == 1
    assert folder.end["state"] == "CONFIG"
    assert standing(folder, "77_0", Job("FAILED", "NonZeroExitCode", "n1")) is None


def test_a_job_that_dies_while_it_checks_has_said_where_it_is(make_run, job_command):
    folder = make_run()
    pipe = folder.path / "weights"  # reading it waits for ever
    os.mkfifo(pipe)
    folder.update_run(inputs=[{"key": "task.source", "files": {str(pipe): "cafe"}}])
    job = subprocess.Popen(job_command(folder))
    try:
        until(lambda: folder.attempts and (folder.attempts[0] / "start.json").exists())
    finally:
        job.kill()
        job.wait()
    assert read_json(folder.attempts[0] / "start.json")["pid"] == job.pid


def test_a_job_that_slurm_requeues_after_an_outcome_does_not_try_it_again(
    make_run, job_command, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    folder = make_run()
    attempt = folder.new_attempt()
    write_json(attempt / "start.json", {"time": 1.0, "slurm_job_id": "78"})
    write_json(attempt / "end.json", {"state": "DIVERGED", "reason": "DIVERGED: step 7"})
    assert work(job_command(folder)) == 1
    assert len(folder.attempts) == 1
    monkeypatch.setenv("SLURM_JOB_ID", "79")  # a retry's
    assert work(job_command(folder)) == 0


def test_a_check_that_cannot_be_made_is_a_reason_too(make_run, monkeypatch):
    def unreadable(*_):
        raise PermissionError("rows.jsonl")

    folder = make_run()
    monkeypatch.setattr("harness.job.inputs.changed", unreadable)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        run_job(folder.path)  # in this process, whose signals it blocks
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert folder.end["reason"] == "FAILED: the job failed: PermissionError: rows.jsonl"
