"""How an attempt ended is told from its exit code, its last words and what it left, and only a checked product is success."""

from __future__ import annotations

import signal

import pytest

from harness.causes import cause
from harness.outcome import EXIT_JUDGED, Unfinished, judge_exit, product, summarise
from harness.run_folder import write_json
from tests.harness.test_job import work


def test_exit_code_zero_without_the_last_step_is_a_failure(make_run, job_command):
    folder = make_run(body="record(1); record(2)", steps=3)
    assert work(job_command(folder)) == 1
    assert folder.done is None
    assert "ends at step 2" in folder.end["reason"]


def test_the_last_step_of_an_earlier_attempt_does_not_count(make_run, job_command):
    folder = make_run(body="sys.exit(0)", steps=3)
    folder.metrics.write_text('{"step": 3, "attempt": 7}\n')
    work(job_command(folder))
    assert folder.done is None


def test_a_record_that_cannot_be_read_is_a_failure_with_its_reason(make_run, job_command):
    folder = make_run(body="(run / 'metrics.jsonl').write_text('{\\n')", steps=3)
    assert work(job_command(folder)) == 1
    assert folder.done is None
    assert folder.end["state"] == "FAILED" and "exit code 0, but" in folder.end["reason"]


def test_a_failure_keeps_exit_code_and_the_error(make_run, job_command):
    folder = make_run(body="raise ValueError('no such layout')")
    assert work(job_command(folder)) == 1
    assert folder.end["reason"] == "FAILED: exit code 1: ValueError: no such layout"


def test_the_runs_own_judgement_keeps_its_name(make_run, job_command):
    folder = make_run(
        body="(run / 'attempts' / f'{attempt:02d}' / 'reason.json').write_text("
        "json.dumps({'reason': 'DIVERGED', 'detail': 'step 7: loss nan'})); sys.exit(3)"
    )
    work(job_command(folder))
    assert folder.end["reason"] == "DIVERGED: step 7: loss nan"


def test_a_run_whose_supervisor_died_at_its_end_is_done(make_run, job_command):
    """The next attempt finds it finished by the earlier one and has nothing to do."""
    folder = make_run(body="sys.exit(0)", steps=3)
    folder.metrics.write_text('{"step": 3, "attempt": 7}\n')
    write_json(folder.path / "heartbeat.json", {"phase": "finished", "step": 3, "attempt": 7})
    work(job_command(folder))
    assert folder.done is not None


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("DIVERGED", "DIVERGED"),
        ("EVERYTHING_DROPPED", "EVERYTHING_DROPPED"),
        ("BOOKS_NOT_CLOSED", "BOOKS_NOT_CLOSED"),
        ("DATA", "DATA"),
        ("ENGINE", "OOM"),
        ("WORKER_DIED", "OOM"),
    ],
)
def test_a_process_killed_for_memory_explains_a_death_and_no_judgement_of_figures(
    make_run, reason, state
):
    """An agent's sandbox may have been killed hundreds of steps before, and was survived."""
    folder = make_run()
    attempt = folder.new_attempt()
    write_json(attempt / "reason.json", {"reason": reason, "detail": "step 412: loss nan"})
    said = judge_exit(folder, attempt, EXIT_JUDGED, killed_for_memory=True)
    assert said[0] == state and (state == "OOM" or said[1] == "step 412: loss nan")


def test_a_bad_row_met_in_the_middle_is_an_outcome_with_its_own_advice():
    assert cause("DATA").kind == "outcome" and "leave it out" in cause("DATA").advice


def test_exit_code_two_is_a_bad_configuration(make_run, job_command):
    folder = make_run(body="print('config.yaml: lr: must be positive'); sys.exit(2)")
    work(job_command(folder))
    assert folder.end["reason"] == "CONFIG: exit code 2: config.yaml: lr: must be positive"


def test_exit_code_two_after_a_measurement_is_an_outcome(make_run, job_command):
    folder = make_run(body="record(1); print('argparse: no such tool'); sys.exit(2)")
    work(job_command(folder))
    assert folder.end["reason"] == "FAILED: exit code 2: argparse: no such tool"


def test_exit_code_two_of_an_attempt_that_measured_nothing_is_a_bad_configuration(
    make_run, job_command
):
    folder = make_run(body="sys.exit(2)")
    folder.metrics.write_text('{"step": 1, "attempt": 7}\n')
    work(job_command(folder))
    assert folder.end["state"] == "CONFIG"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_a_crash_of_the_program_is_an_outcome(make_run, job_command, name):
    folder = make_run(body=f"import signal; record(1); os.kill(os.getpid(), signal.{name})")
    work(job_command(folder))
    assert folder.end["state"] == "FAILED" and folder.end["exit_code"] == -getattr(signal, name)
    assert folder.end["reason"].startswith(f"FAILED: {name} ended the command")


def test_a_crash_for_want_of_memory_or_of_the_network_says_so(make_run):
    folder = make_run()
    for words, state in (
        ("what():  CUDA error: out of memory", "OOM"),
        ("what():  [Rank 1] NCCL error: remote process exited", "INFRA"),
        ("Fatal Python error: Segmentation fault", "FAILED"),
    ):
        attempt = folder.new_attempt()
        log = f"terminate called after throwing\n  {words}\n\nCurrent thread 0x1:\n  File x\n"
        (attempt / "output.log").write_text(log)
        said = judge_exit(folder, attempt, -signal.SIGABRT)
        assert said[0] == state and said[1].endswith(words)


def test_a_kill_from_outside_is_an_interruption(make_run, job_command):
    folder = make_run(body="import signal; os.kill(os.getpid(), signal.SIGKILL)")
    work(job_command(folder))
    assert folder.end["reason"] == "KILLED: SIGKILL ended the command"


def test_exit_code_four_is_a_run_that_saved_and_goes_on(make_run, job_command):
    folder = make_run(body="sys.exit(4)")
    work(job_command(folder))
    assert folder.end["state"] == "KILLED" and "goes on from there" in folder.end["reason"]
    assert folder.done is None


def test_a_step_of_two_attempts_counts_as_the_later_saw_it(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(
        '{"step": 1, "attempt": 1, "reward_mean": 0.0}\n{"step": 1, "attempt": 2, "reward_mean": 1.0}\n'
    )
    assert summarise(metrics)["reward_mean_last10"] == 1.0


def test_a_warm_up_without_a_hash_is_unfinished(make_run):
    folder = make_run("warmup-00000000", kind="warmup")
    with pytest.raises(Unfinished, match="content_hash"):
        product(folder)
