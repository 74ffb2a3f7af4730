"""Time to a threshold: when a run crosses it, and what becomes of runs that never do."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from analysis.endpoint import Endpoint
from analysis.load import FINISHED, RunRecord, load_experiment
from analysis.plan import ExclusionRules
from analysis.summaries import SummaryError, crossing, summarise
from analysis.thresholds import Crossing, _scores, race
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


FREIREICH_TREATED = [
    (6, 1), (6, 1), (6, 1), (6, 0), (7, 1), (9, 0), (10, 1), (10, 0), (11, 0), (13, 1), (16, 1), (17, 0), (19, 0),
    (20, 0), (22, 1), (23, 1), (25, 0), (32, 0), (32, 0), (34, 0), (35, 0),
]  # fmt: skip
FREIREICH_PLACEBO = [
    (t, 1) for t in (1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23)
]


def crossings(pairs) -> list[Crossing]:
    return [Crossing(float(time), bool(reached)) for time, reached in pairs]


def test_a_clear_race_of_many_runs():
    """Freireich et al. 1963, remission in weeks, 6-MP against placebo: chi-square 16.793 on 1 df, p = 4e-5 (R survdiff)."""
    found = race(crossings(FREIREICH_TREATED), crossings(FREIREICH_PLACEBO), alpha=0.05)
    assert found.p_logrank < 2e-4 and not found.exact
    assert not found.candidate_first and (found.reached, found.reached_baseline) == (9, 21)


def test_crossed_minus_expected_is_the_published_one():
    """The same data: 9 and 21 crossed, 19.25 and 10.75 expected (R survdiff)."""
    scores = _scores(crossings([*FREIREICH_TREATED, *FREIREICH_PLACEBO]))
    assert scores[:21].sum() == pytest.approx(9 - 19.25, abs=0.005)
    assert scores[21:].sum() == pytest.approx(21 - 10.75, abs=0.005)


def test_three_against_three_runs_are_never_different():
    """20 ways to choose 3 of 6, so the most extreme order has p = 2/20; its chi-square law says 0.025."""
    fast, slow = [(10, 1), (20, 1), (30, 1)], [(40, 1), (50, 1), (60, 0)]
    found = race(crossings(fast), crossings(slow), alpha=0.05)
    assert found.p_logrank == pytest.approx(0.1) and found.exact and found.least_runs == 4
    assert any("no p below 0.1" in caution for caution in found.cautions)


def test_the_p_is_the_share_of_rearrangements_as_extreme():
    """Second implementation: all 70 splits of 4 and 4, crossed minus expected written out time by time."""
    pairs = [(3, 1), (9, 1), (12, 1), (40, 0), (7, 1), (25, 1), (40, 0), (40, 0)]

    def numerator(chosen):
        total = 0.0
        for time in sorted({t for t, reached in pairs if reached}):
            at_risk = [i for i, (t, _) in enumerate(pairs) if t >= time]
            crossed = [i for i in at_risk if pairs[i] == (time, 1)]
            total += sum(i in chosen for i in crossed)
            total -= len(crossed) * sum(i in chosen for i in at_risk) / len(at_risk)
        return total

    all_of_them = [numerator(set(chosen)) for chosen in combinations(range(8), 4)]
    seen = numerator({0, 1, 2, 3})
    above = sum(value >= seen - 1e-9 for value in all_of_them) / 70
    below = sum(value <= seen + 1e-9 for value in all_of_them) / 70
    found = race(crossings(pairs[:4]), crossings(pairs[4:]), alpha=0.05)
    assert found.p_logrank == pytest.approx(min(1.0, 2 * min(above, below)))


def test_a_false_difference_is_as_rare_as_promised():
    """500 races of 5 and 5 equal arms: 5 % of them, within three standard errors (the chi-square law: 7.3 %)."""
    random = np.random.default_rng(3)
    times = random.exponential(40, (500, 10)).clip(max=60)
    times[:, 0] = np.minimum(times[:, 0], 59)
    races = [crossings((t, t < 60) for t in row) for row in times]
    false = np.mean([race(row[:5], row[5:], alpha=0.05).p_logrank < 0.05 for row in races])
    assert false <= 0.05 + 3 * (0.05 * 0.95 / 500) ** 0.5


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


def test_a_clear_race_of_three_runs_a_side_is_open_and_says_from_when_it_could_be_seen(tmp_path):
    def race_of_steps(system, seed, record):
        first = {"molt": (10, 20, 30), "megatron": (40, 50, 99)}[system][seed]
        if "eval_reward_mean" in record and record["step"]:
            record["eval_reward_mean"] = 0.9 if record["step"] >= first else 0.5

    folder = write_experiment(
        tmp_path, seeds=(0, 1, 2), steps=60, controls=0, edit_record=race_of_steps,
        endpoints=(endpoint(threshold=0.86, primary=True),),
    )  # fmt: skip
    (result,) = judge(load_experiment(folder))
    assert result.decision.verdict == Verdict.INCONCLUSIVE and result.decision.needed is None
    assert "below n = 4 a side" in result.decision.reasons[1]
    assert any("no p below 0.1" in caution for caution in result.cautions)


def test_a_threshold_that_the_control_crosses_is_capped(tmp_path):
    folder = write_experiment(
        tmp_path,
        steps=20,
        endpoints=(endpoint(threshold=0.425, primary=True), ACCURACY),
        controls=4,
    )
    checks = {c.name: c for c in judge(load_experiment(folder))[0].measurement.checks}
    assert checks["control of time to half"].caps
