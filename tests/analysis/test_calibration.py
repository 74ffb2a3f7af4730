"""The measured table of false verdicts, and the warnings that are read from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.calibration import ALLOWED, TELLING, cells, nearest, shape_of, warnings
from analysis.inference import Verdict, compare_samples
from analysis.load import load_experiment
from analysis.verdict import judge
from tests.analysis.synthetic import MEGATRON, MOLT, write_experiment
from tests.bench import calibration as study

CLAIMS = (Verdict.DIFFERENT, Verdict.EQUIVALENT, Verdict.NON_INFERIOR)


def test_false_verdicts_of_normal_runs_are_at_most_six_percent():
    """The promise: as many runs a side, spread ratios up to 5, every n from 3 to 20, with 100,000 draws a cell."""
    normal = [c for c in cells() if c.shape == "normal" and c.n == c.n_baseline]
    promised = [c for c in normal if c.spread_ratio <= 5]
    assert {c.n for c in promised} == {3, 4, 5, 8, 10, 15, 20}
    for cell in promised:
        error = 2 * (0.05 * 0.95 / cell.draws) ** 0.5
        assert max(cell.rate(v) for v in CLAIMS) <= 0.06 + error


@pytest.mark.parametrize(
    ("shape", "ratio", "n", "n_baseline", "paired"),
    [
        ("normal", 1.0, 3, 3, False),
        ("normal", 5.0, 3, 3, False),
        ("skewed", 5.0, 5, 5, False),
        ("opposed", 1.0, 10, 10, False),
        ("heavy", 2.0, 4, 4, False),
        ("normal", 1.0, 3, 20, False),
        ("skewed", 2.0, 3, 10, False),
        ("skewed", 1.0, 5, 5, True),
    ],
)
def test_the_committed_table_is_what_the_study_measures(shape, ratio, n, n_baseline, paired):
    """4,000 fresh draws: within four of their standard errors of the committed 100,000."""
    committed = nearest(shape, ratio, n, n_baseline, paired=paired)
    fresh = study.measure(shape, ratio, n, n_baseline, paired=paired, draws=4000, seed=1)
    key = (committed.shape, committed.spread_ratio, committed.n, committed.n_baseline)
    assert key == (shape, ratio, n, n_baseline)
    for name in ("false_different", "false_equivalent", "false_non_inferior", "seen"):
        rate = getattr(committed, name)
        error = (rate * (1 - rate) / 4000) ** 0.5
        assert getattr(fresh, name) == pytest.approx(rate, abs=max(4 * error, 1e-3))


def test_the_study_judges_as_the_report_does():
    random = np.random.default_rng(5)
    ours, theirs = random.normal(0.4, 1, (50, 4)), random.normal(0, 2, (50, 4))
    for paired in (False, True):
        for row in zip(
            ours, theirs, *study._test(*((ours - theirs,) if paired else (ours, theirs)))
        ):
            x, y, p_value, low, high = row
            comparison = compare_samples(x, y, margin=2.5, paired=paired)
            assert comparison.p_difference == pytest.approx(p_value)
            assert (comparison.tost_low, comparison.tost_high) == pytest.approx((low, high))
            assert (comparison.p_equivalence < 0.05) == (low > -2.5 and high < 2.5)


def test_every_cell_above_the_bound_is_bold_in_the_document():
    text = study.document(list(cells()))
    bold = sum(rate > ALLOWED for c in cells() for rate in c.shown)
    assert text.count("**") == 2 * bold
    assert study.DOCUMENT.read_text() == text


SKEWED = [0.1, 0.2, 0.3, 0.5, 0.9, 1.4, 0.15, 0.25, 4.0, 0.4]


def test_skewed_data_are_warned_of_with_the_measured_rate():
    wide = [5 * value for value in SKEWED]
    comparison = compare_samples(SKEWED, wide, margin=1.0)
    (warning,) = warnings(comparison, (SKEWED, wide), Verdict.DIFFERENT)
    measured = nearest("skewed", 5.0, 10).false_different
    assert "look skewed, spreads 5-fold apart; there, with 10 and 10 runs" in warning
    assert f"DIFFERENT was false in {measured:.1%}" in warning
    assert warnings(comparison, (SKEWED, wide), Verdict.INCONCLUSIVE) == []


def test_normal_data_are_not_warned_of():
    ours = list(np.random.default_rng(0).normal(0, 1, 10))
    comparison = compare_samples(ours, [1.1 * x for x in ours], margin=1.0)
    assert shape_of((ours, ours), "absolute") == "normal"
    assert warnings(comparison, (ours, ours), Verdict.DIFFERENT) == []


def test_three_against_twenty_normal_runs_are_warned_of():
    """Welch's test is false in 7.3 % there, whatever the shape."""
    random = np.random.default_rng(1)
    few, many = list(random.normal(0, 1, 3)), list(random.normal(0, 1, 20))
    for pair in ((few, many), (many, few)):
        (warning,) = warnings(compare_samples(*pair, margin=1.0), pair, Verdict.DIFFERENT)
        assert "with 3 and 20 runs, DIFFERENT was false in" in warning


def test_the_spread_is_that_of_the_arm_with_fewer_runs_whichever_it_is():
    assert nearest("normal", 5.0, 3, 10) == nearest("normal", 0.2, 10, 3)
    assert nearest("normal", 5.0, 3, 10) != nearest("normal", 0.2, 3, 10)
    assert nearest("normal", 5.0, 4, 4) == nearest("normal", 0.2, 4, 4)


def test_skewed_pairs_are_warned_of_by_their_differences():
    """Differences of skewness 2 at n = 10: DIFFERENT false in 9.9 %, EQUIVALENT and NON-INFERIOR in 13.3 %."""
    baseline = list(np.random.default_rng(2).normal(10, 3, 10))
    ours = [b + d for b, d in zip(baseline, SKEWED)]
    comparison = compare_samples(ours, baseline, margin=5.0, paired=True)
    for verdict, rate in ((Verdict.DIFFERENT, 0.099), (Verdict.NON_INFERIOR, 0.133)):
        (warning,) = warnings(comparison, (ours, baseline), verdict)
        assert "the data look skewed; there, with 10 pairs" in warning
        assert f"{verdict} was false in" in warning
        measured = nearest("skewed", 1.0, 10, paired=True).rate(verdict)
        assert measured == pytest.approx(rate, abs=0.003) and f"{measured:.1%}" in warning


def test_how_often_a_skew_shows_is_measured():
    """A second implementation of "looks skewed", on 2,000 exponential samples of 10 and 10."""
    random = np.random.default_rng(4)
    seen = 0
    for _ in range(2000):
        sides = [random.standard_exponential(10) for _ in range(2)]
        residuals = [(s - s.mean()) / s.std() for s in sides]
        skews = [(r**3).mean() for r in residuals]
        pooled = (np.concatenate(residuals) ** 3).mean()
        seen += abs(pooled) > 0.8 or (min(map(abs, skews)) > 0.8 and skews[0] * skews[1] < 0)
    cell = nearest("skewed", 1.0, 10)
    assert cell.seen == pytest.approx(seen / 2000, abs=0.05) and 0.55 < cell.seen < TELLING


def test_three_runs_cannot_show_their_skew_and_are_warned_of():
    ours, theirs = [1.0, 2.0, 3.0], [10.0, 25.0, 40.0]
    comparison = compare_samples(ours, theirs, margin=1.0)
    (warning,) = warnings(comparison, (ours, theirs), Verdict.DIFFERENT)
    assert "3 and 3 runs cannot show whether they are skewed (of skewed ones 0% do)" in warning


def test_a_report_carries_the_warning_beside_its_verdict(tmp_path):
    arms = {"molt": replace(MOLT, step_log_sd=0.15), "megatron": replace(MEGATRON, step_s=6.0)}
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, arms=arms)
    result = judge(load_experiment(folder))[1]
    assert result.decision.verdict == Verdict.DIFFERENT
    assert any("3 and 3 runs cannot show whether" in caution for caution in result.cautions)
