"""The cause of an end, told from the record and the log."""

from __future__ import annotations

import pytest

from harness.causes import from_slurm, told_by
from harness.logs import attempt_log, follow
from harness.run_folder import hold, write_json
from harness.run_status import RunStatus
from harness.standing import _waits
from harness.why import Account, account, by_speaker, error_lines, find_run
from tests.harness.test_job import work

LOG = [
    "step 1/3  reward 0.1",
    "(TrainWorker pid=12) loss 0.5",
    "(EngineWorker pid=13, ip=10.0.0.2) 4 requests",
    "(EngineCore_DP0 pid=14) KV cache 3 %",
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "ValueError: no",
]


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "OOM"),
        ("ray.exceptions.OutOfMemoryError: Task was killed", "OOM"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=3.0. Some of the", "OOM"),
        ("OSError: [Errno 98] Address already in use", "INFRA"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "INFRA"),
        ("OSError: [Errno 28] No space left on device", "INFRA"),
        ("OSError: [Errno 116] Stale file handle", "INFRA"),
        ("ValueError: shapes do not match", None),
    ],
)
def test_words_of_an_error_tell_memory_and_infrastructure_from_a_fault(words, state):
    assert told_by(words) == state


@pytest.mark.parametrize(
    ("slurm", "state"),
    [
        ("OUT_OF_MEMORY", "OOM"),
        ("NODE_FAIL", "NODE_FAIL"),
        ("CANCELLED", "KILLED"),
        ("TIMEOUT", "TIMEOUT"),
    ],
)
def test_slurms_word_is_translated_where_the_job_left_none(slurm, state):
    assert from_slurm(slurm, "node3", "")[0] == state


def test_the_error_is_the_last_traceback():
    assert error_lines(LOG) == LOG[4:]


def test_each_part_of_a_run_has_its_own_last_words():
    found = by_speaker(LOG)
    assert found["trainer"] == ["loss 0.5"]
    assert found["engine"] == ["4 requests", "KV cache 3 %"]
    assert found["driver"][0] == "step 1/3  reward 0.1"


def test_an_account_holds_cause_advice_attempts_and_error(make_run, job_command):
    folder = make_run(body="record(1)\nraise ValueError('no such thing')")
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    work(job_command(folder))
    told = account(find_run(folder.path.parents[2], "molt-s0"))
    assert told.status.state == "FAILED"
    assert told.error[-1] == "ValueError: no such thing"
    assert "retry --force" in told.advice
    assert [one["state"] for one in told.attempts] == ["FAILED"]


def test_a_name_of_several_runs_is_refused_by_naming_them(make_run):
    first, second = make_run("molt-s0-11111111"), make_run("molt-s1-22222222")
    write_json(first.path.parent / "queue.json", {"order": [], "work": {}})
    with pytest.raises(
        FileNotFoundError, match=f"2 runs have it .*; there is {first.name}, {second.name}"
    ):
        find_run(first.path.parents[2], "molt")


def test_a_part_of_a_name_means_the_last_submits_run(make_run):
    """After an edit the folder has two runs of that system and seed."""
    old, new = make_run("molt-s0-11111111"), make_run("molt-s0-22222222")
    write_json(old.path.parent / "queue.json", {"order": [new.name], "work": {}})
    runs = old.path.parents[2]
    assert find_run(runs, "molt-s0").path == new.path
    assert find_run(runs, old.name).path == old.path
    control = make_run("control-molt-s0-33333333")
    write_json(old.path.parent / "queue.json", {"order": [control.name, new.name], "work": {}})
    assert find_run(runs, "molt-s0").path == new.path  # and not the arm's control as well
    with pytest.raises(FileNotFoundError, match="there is no run of|nothing|there"):
        find_run(runs, "molt-s0", experiment="another")


@pytest.mark.parametrize(
    ("why", "do"),
    [
        ("held; `scontrol release` lets it go (JobHeldUser)", "`scontrol release 7_1` lets it go."),
        ("other jobs come first (Priority)", "Nothing: Slurm or the queue will start it."),
        (_waits("PartitionTimeLimit"), "Its time limit is over the partition's: lower it, "),
        (_waits("BadConstraints"), "Take nodes out of the profile's exclude"),
    ],
)
def test_a_job_that_waits_for_a_person_says_what_the_person_does(why, do):
    status = RunStatus("molt-s0", "train", "molt", 0, "WAITING", why=why, job="7_1")
    assert Account(status, "", [], [], {}, [], []).advice.startswith(do)


@pytest.mark.parametrize(
    ("attempts", "asked", "problem"),
    [
        (0, None, "has not been started"),
        (2, 3, "has no attempt 3; there is 1, 2"),
        (1, 1, "attempt 01 has said nothing"),
    ],
)
def test_a_log_that_is_not_there_is_missed_in_words(make_run, attempts, asked, problem):
    folder = make_run()
    for _ in range(attempts):
        folder.new_attempt()
    with pytest.raises(FileNotFoundError, match=problem):
        attempt_log(folder, asked)


def test_following_a_run_goes_over_into_its_next_attempt(make_run):
    folder = make_run()
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    with hold(folder.lock):  # at work
        for number, text in ((1, "one"), (2, "two")):
            (folder.new_attempt() / "output.log").write_text(f"{text}\n")
            if number == 1:
                shown = follow(folder)
                assert next(shown) == b"one\n"
        assert next(shown) == b"==> attempt 02 <==\n"
    assert b"".join(shown) == b"two\n"
