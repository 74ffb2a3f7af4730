"""Run folders are read as they are: losses with their reason, later attempts first, nothing that is not finite."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest

from analysis.load import (
    FINISHED,
    LOST,
    NOT_STARTED,
    LoadError,
    load_experiment,
    load_run,
    read_metrics,
    steady,
)
from analysis.plan import ExclusionRules
from tests.analysis.synthetic import write_experiment


def write_lines(path, records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


def test_a_finished_run_is_read_whole(sound):
    run = load_experiment(sound).finished("molt")[0]
    assert (run.state, run.seed, run.attempts, run.faults) == (FINISHED, 0, 1, ())
    assert list(run.training.index) == list(range(1, 61))
    assert run.metrics.index[0] == 0


def test_a_run_without_done_is_lost_with_the_reason_of_its_last_attempt(tmp_path):
    folder = write_experiment(
        tmp_path, seeds=(0, 1, 2), steps=8, lost={("molt", 1): "NaN loss at step 4"}
    )
    lost = load_experiment(folder).of("molt")[1]
    assert (lost.state, lost.reason) == (LOST, "NaN loss at step 4")


def test_a_run_that_died_without_a_word_is_lost_where_its_heart_stopped(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=8, lost={("molt", 1): "x"})
    (next(folder.glob("molt-s1-*")) / "attempts" / "01" / "end.json").unlink()
    assert load_experiment(folder).of("molt")[1].reason.endswith("in phase train at step 3")


def test_a_planned_run_that_is_absent_is_not_started(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=8, absent=(("megatron", 2),))
    assert load_experiment(folder).of("megatron")[2].state == NOT_STARTED


def test_a_run_that_waits_for_its_turn_is_not_started(tmp_path):
    """Submit writes run.json; only an attempt starts a run."""
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=8, lost={("molt", 1): "x"})
    shutil.rmtree(next(folder.glob("molt-s1-*")) / "attempts")
    assert load_experiment(folder).of("molt")[1].state == NOT_STARTED


def test_a_step_of_two_attempts_counts_once_as_the_later_saw_it(tmp_path):
    path = write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": 1, "attempt": 1, "loss": 1.0},
            {"step": 2, "attempt": 2, "loss": 20.0},
            {"step": 2, "attempt": 1, "loss": 2.0},
        ],
    )
    frame, _ = read_metrics(path)
    assert list(frame["loss"]) == [1.0, 20.0]
    assert frame.attrs["repeated_steps"] == 1


def test_records_changed_after_the_run_was_done_are_a_fault(tmp_path):
    folder = next(write_experiment(tmp_path, seeds=(0, 1, 2), steps=4).glob("molt-s0-*"))
    metrics = folder / "metrics.jsonl"
    digest = hashlib.sha256(metrics.read_bytes()).hexdigest()
    (folder / "done.json").write_text(json.dumps({"metrics_sha256": digest}))
    assert load_run(folder).faults == ()
    metrics.write_text(metrics.read_text().replace('"lag_max": 1', '"lag_max": 0', 1))
    (fault,) = load_run(folder).faults
    assert "metrics.jsonl changed after the run was done" in fault


def test_an_attempt_whose_every_step_was_recorded_again_is_counted_step_by_step(tmp_path):
    steps = [{"step": step, "attempt": attempt} for attempt in (1, 2) for step in (0, 1, 2)]
    frame, _ = read_metrics(write_lines(tmp_path / "metrics.jsonl", steps))
    assert frame.attrs["repeated_steps"] == 2


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_value_that_is_not_finite_is_refused_and_named(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 7, "loss": {text}, "grad_norm": 1.0}}\n')
    frame, faults = read_metrics(path)
    assert "loss" not in frame and frame.loc[7, "grad_norm"] == 1.0
    assert len(faults) == 1 and "loss" in faults[0] and "step 7" in faults[0]


def test_counts_by_reason_are_summed(tmp_path):
    path = write_lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "tokens_dropped": {"stale": 3, "too long": 4}}]
    )
    assert read_metrics(path)[0].loc[1, "tokens_dropped"] == 7


def test_a_torn_last_line_is_what_a_kill_leaves(tmp_path):
    path = write_lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}], tail='{"step": 2, "lo'
    )
    assert list(read_metrics(path)[0].index) == [1]


def test_a_torn_line_inside_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(LoadError, match="metrics.jsonl:2"):
        read_metrics(path)


def test_a_folder_of_another_identity_is_not_the_planned_run(tmp_path):
    folder = write_experiment(
        tmp_path,
        seeds=(0, 1, 2),
        steps=4,
        edit_run=lambda s, seed, run: (
            run.update(identity="other") if (s, seed) == ("molt", 1) else None
        ),
    )
    run = load_experiment(folder).of("molt")[1]
    assert run.state == LOST and "identity is 'other'" in run.reason


@pytest.mark.parametrize(
    ("value", "shown"),
    [("0.9", "'0.9'"), ("x", "'x'"), (True, "True"), ([1], "[1]"), (1e300, "1e+300"), (10**400, "1000"),
     ({"a": "x"}, "{'a': 'x'}")],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_name_and_never_enters_a_mean(tmp_path, value, shown):
    lines = [{"step": 1, "loss": 2.0, "phase": "train"}, {"step": 2, "loss": value}]
    metrics, faults = read_metrics(write_lines(tmp_path / "metrics.jsonl", lines))
    assert list(metrics["loss"].dropna()) == [2.0] and metrics["loss"].dtype == float
    (fault,) = faults
    assert f"loss is {shown}" in fault and fault.endswith("at step 2")


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda run: (run / "run.json").write_bytes(b"\xff\xfe"), "run.json: cannot be read"),
        (lambda run: (run / "run.json").write_text("[]"), "run.json: a JSON object is expected"),
        (lambda run: edit_json(run / "run.json", config=None), "run.json: key config is null"),
        (lambda run: edit_json(run / "run.json", config={"loop": 3}), "key config.loop is 3"),
        (lambda run: edit_json(run / "run.json", conformance=None), "key conformance is null"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"), "metrics.jsonl: cannot be read"),
        (lambda run: (run / "metrics.jsonl").write_text("{}\n"), "metrics.jsonl:1: a record needs"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "attempt": "x"}\n'), "attempt is 'x'"),
        (lambda run: (run / "done.json").write_text(""), "done.json: not JSON"),
        (lambda run: (run / "attempts/01/start.json").write_text("{"), "start.json: not JSON"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_read_is_lost_and_stops_no_other(tmp_path, damage, reason):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2, 3), steps=6)
    (run,) = folder.glob("molt-s1-*")
    damage(run)
    runs = load_experiment(folder).of("molt")
    assert [r.state for r in runs] == [FINISHED, LOST, FINISHED, FINISHED]
    assert reason in runs[1].reason and runs[1].reason.startswith("cannot be read: ")


def test_an_attempt_without_a_time_has_no_place_in_a_timeline(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=4)
    (run,) = folder.glob("molt-s1-*")
    (run / "attempts/01/start.json").write_text("{}")
    (run / "attempts/tmp").mkdir()
    found = load_experiment(folder).of("molt")[1]
    assert found.state == FINISHED and found.spans == () and found.attempts == 1


def test_an_unreadable_folder_beyond_the_plan_is_still_shown(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=4)
    (folder / "molt-s9-deadbeef").mkdir()
    (folder / "molt-s9-deadbeef" / "run.json").write_text("{")
    (beyond,) = load_experiment(folder).beyond
    assert (beyond.system, beyond.state) == ("molt", LOST)


def test_a_run_that_the_plan_does_not_name_stands_apart(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=4)
    extra = folder / "molt-s9-deadbeef"
    extra.mkdir()
    facts = {"system": "molt", "seed": 9, "identity": "deadbeef", "kind": "train", "config": {}}
    (extra / "run.json").write_text(json.dumps(facts))
    experiment = load_experiment(folder)
    assert [run.folder for run in experiment.beyond] == ["molt-s9-deadbeef"]
    assert len(experiment.of("molt")) == 3


def test_steady_steps_leave_out_warm_up_resume_and_evaluation(tmp_path):
    def resume(system, seed, record):
        record["attempt"] = 2 if record["step"] > 12 else 1

    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, edit_record=resume)
    run = load_experiment(folder).of("molt")[0]
    rules = ExclusionRules(warmup_steps=5, after_resume_steps=2, exclude_evaluation=True)
    assert list(steady(run, rules).index) == [6, 7, 8, 9, 11, 12, 15, 16, 17, 18, 19]
