"""Time to a threshold: when a run crosses it, and what becomes of runs that never do."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.endpoint import Endpoint
from analysis.load import FINISHED, RunRecord, load_experiment
from analysis.plan import ExclusionRules
from analysis.summaries import SummaryError, crossing, summarise
from analysis.thresholds import Crossing, race
from analysis.verdict import Verdict, judge
from tests.analysis.synthetic import ACCURACY, TRAINER_TIME, write_experiment


def endpoint(summary="steps_to_threshold", threshold=0.5, **more) -> Endpoint:
    return Endpoint(
        name="time to half", field="eval_reward_mean", summary=summary, threshold=threshold, unit="steps",
        direction="lower", margin=0.2, margin_reason="r", scale="ratio", **more,
    )  # fmt: skip


def run_of(accuracy, wall_s) -> RunRecord:
    steps = pd.Index(range(len(accuracy)), name="step")
    frame = pd.DataFrame({"eval_reward_mean": accuracy, "wall_s": wall_s}, index=steps)
    return RunRecord("run", "molt", 0, "id", FINISHED, "", {}, frame)


RISING = run_of([0.1, None, 0.4, None, 0.6, 0.7], [None, 2.0, 3.0, 2.0, 5.0, 1.0])


def test_the_step_is_the_first_recorded_at_or_above():
    assert crossing(endpoint(), RISING) == Crossing(4.0, True)


def test_the_seconds_are_the_wall_time_up_to_it():
    assert crossing(endpoint("seconds_to_threshold"), RISING) == Crossing(12.0, True)


def test_a_run_that_never_gets_there_is_censored_where_it_ends():
    assert crossing(endpoint(threshold=0.9), RISING) == Crossing(5.0, False)


def test_a_run_that_starts_there_has_no_way_to_go():
    with pytest.raises(SummaryError, match="first record"):
        summarise(endpoint(threshold=0.1), RISING, ExclusionRules())


def test_the_log_rank_test_by_hand():
    """Freireich et al. 1963, remission in weeks, 6-MP against placebo: chi-square 16.793 on 1 df, p = 4.17e-5 (R survdiff)."""
    treated = [(6, 1), (6, 1), (6, 1), (6, 0), (7, 1), (9, 0), (10, 1), (10, 0), (11, 0), (13, 1), (16, 1),
               (17, 0), (19, 0), (20, 0), (22, 1), (23, 1), (25, 0), (32, 0), (32, 0), (34, 0), (35, 0)]  # fmt: skip
    placebo = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
    found = race(
        [Crossing(t, bool(e)) for t, e in treated], [Crossing(t, True) for t in placebo], alpha=0.05
    )
    assert found.p_logrank == pytest.approx(4.17e-5, rel=0.005)
    assert not found.candidate_first and (found.reached, found.reached_baseline) == (9, 21)


def test_no_crossing_at_all_is_no_race():
    with pytest.raises(ValueError, match="no run of either arm"):
        race([Crossing(5, False)] * 3, [Crossing(5, False)] * 3, alpha=0.05)


def test_when_all_cross_the_times_are_compared_like_any_numbers(tmp_path):
    """The shared curve reaches 0.7 of its rise at 60 %: both arms cross 0.6 at step 20 or 30 of 60."""
    slow = endpoint("seconds_to_threshold", threshold=0.6, primary=True)
    folder = write_experiment(tmp_path, steps=60, endpoints=(slow,))
    (result,) = judge(load_experiment(folder))
    assert result.measurement.race is None
    assert result.comparison.estimate == pytest.approx(1.5 / 1.8, abs=0.06)


def test_a_censored_run_leaves_no_mean_and_a_clear_race_is_different(tmp_path):
    def stuck(system, seed, record):
        if system == "megatron" and "eval_reward_mean" in record:
            record["eval_reward_mean"] = 0.42 + 0.001 * seed

    own = endpoint(threshold=0.6, primary=True)
    folder = write_experiment(tmp_path, steps=60, endpoints=(own, TRAINER_TIME), edit_record=stuck)
    result = judge(load_experiment(folder))[0]
    assert result.comparison is None and result.decision.verdict == Verdict.DIFFERENT
    assert "5 of 5 runs against 0 of 5" in result.decision.detail
    assert "earlier than megatron" in result.may_write and "no value" in result.may_not_write


def test_a_threshold_that_the_control_crosses_is_capped(tmp_path):
    folder = write_experiment(
        tmp_path,
        steps=20,
        endpoints=(endpoint(threshold=0.425, primary=True), ACCURACY),
        controls=4,
    )
    checks = {c.name: c for c in judge(load_experiment(folder))[0].measurement.checks}
    assert checks["control of time to half"].caps
