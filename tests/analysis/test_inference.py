"""Golden cases from outside: published summary statistics, textbook data, hand-worked formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from analysis.inference import (
    NoInference,
    Verdict,
    compare_samples,
    mean_interval,
    stand_in_sample,
)

# Seconds a step of two stacks, n = 3 each, as published with their claim of parity: mean and SD.
LEAN, HEAVY = (119.4, 2.3, 3), (109.5, 10.3, 3)


def published(margin: float):
    return compare_samples(
        stand_in_sample(*LEAN), stand_in_sample(*HEAVY), margin=margin * HEAVY[0]
    )


def test_stand_in_sample_has_the_published_mean_and_sd():
    sample = stand_in_sample(119.4, 2.3, 3)
    assert sample.mean() == pytest.approx(119.4) and sample.std(ddof=1) == pytest.approx(2.3)


def test_published_throughput_table_is_not_different():
    comparison = published(0.10)
    assert comparison.estimate == pytest.approx(9.9)
    assert comparison.estimate / HEAVY[0] == pytest.approx(0.090, abs=5e-4)
    assert comparison.t == pytest.approx(1.62, abs=0.005)
    assert comparison.df == pytest.approx(2.2, abs=0.05)
    assert comparison.p_difference == pytest.approx(0.23, abs=0.005)
    reference = stats.ttest_ind_from_stats(*LEAN, *HEAVY, equal_var=False)
    assert comparison.p_difference == pytest.approx(reference.pvalue)


@pytest.mark.parametrize(
    ("margin", "p"), [(0.05, 0.73), (0.10, 0.44), (0.15, 0.19), (0.20, 0.088), (0.25, 0.046)]
)
def test_published_throughput_table_is_not_equivalent_below_a_quarter(margin, p):
    assert published(margin).p_equivalence == pytest.approx(p, abs=0.005)


def test_published_throughput_tables_tost_interval():
    comparison = published(0.10)
    assert comparison.tost_low / HEAVY[0] == pytest.approx(-0.062, abs=5e-4)
    assert comparison.tost_high / HEAVY[0] == pytest.approx(0.243, abs=5e-4)


def test_welch_on_the_sleep_data():
    """Student 1908, the sleep data, taken as independent: R's t.test gives t = -1.8608, df = 17.776, p = 0.07939."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    comparison = compare_samples(first, second, margin=1.0)
    assert comparison.t == pytest.approx(-1.8608, abs=5e-5)
    assert comparison.df == pytest.approx(17.776, abs=5e-4)
    assert comparison.p_difference == pytest.approx(0.07939, abs=5e-6)
    assert (comparison.ci_low, comparison.ci_high) == pytest.approx(
        (-3.3654832, 0.2054832), abs=1e-6
    )


def test_tost_of_a_published_replication():
    """Moery and Calin-Jageman 2016, study 2, as worked in the TOSTER package's example: 5.25 (0.95, n = 95) against 5.22
    (0.83, n = 89) within 0.384: t(182) = -2.69, p = 0.004, and no significant difference."""
    comparison = compare_samples(
        stand_in_sample(5.25, 0.95, 95), stand_in_sample(5.22, 0.83, 89), margin=0.384
    )
    assert comparison.p_equivalence == pytest.approx(0.004, abs=5e-4)
    assert stats.t.isf(comparison.p_equivalence, comparison.df) == pytest.approx(2.69, abs=0.01)
    assert comparison.verdict == Verdict.EQUIVALENT and comparison.p_difference > 0.05


def test_pairs_with_a_log_ratio_by_hand():
    """Ratios 2, 2.2, 1.8 of pairs: the estimate is their geometric mean, the interval a one-sample t on their logs."""
    ours, theirs = [2.0, 4.4, 5.4], [1.0, 2.0, 3.0]
    comparison = compare_samples(ours, theirs, margin=0.1, scale="ratio", paired=True)
    logs = np.log([2.0, 2.2, 1.8])
    half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
    assert comparison.estimate == pytest.approx(math.exp(logs.mean()))
    assert comparison.ci_high == pytest.approx(math.exp(logs.mean() + half))
    assert comparison.spread_of_differences == pytest.approx(logs.std(ddof=1))


def test_paired_differences_without_spread_are_refused():
    with pytest.raises(NoInference, match="all paired differences are equal"):
        compare_samples([1.1, 2.1, 3.1], [1.0, 2.0, 3.0], margin=0.5, paired=True)


def test_an_equivalence_with_a_resolved_difference_says_both():
    comparison = compare_samples([1.30, 1.31, 1.29, 1.305], [1.0, 1.01, 0.99, 1.005], margin=0.5)
    assert comparison.verdict == Verdict.EQUIVALENT
    assert "the difference is resolved" in str(comparison)


def test_the_tost_decision_and_the_90_percent_interval_agree():
    random = np.random.default_rng(3)
    for _ in range(200):
        ours, theirs = random.normal(0, 1, 5), random.normal(0.5, 3, 5)
        comparison = compare_samples(ours, theirs, margin=2.5)
        inside = -2.5 < comparison.tost_low and comparison.tost_high < 2.5
        assert inside == (comparison.p_equivalence < 0.05)


def test_a_ratio_margin_is_symmetric_under_exchange_of_the_arms():
    ours, theirs = [1.0, 1.1, 1.05], [1.2, 1.1, 1.25]
    forth = compare_samples(ours, theirs, margin=0.1, scale="ratio")
    back = compare_samples(theirs, ours, margin=0.1, scale="ratio")
    assert (forth.bound_low, forth.bound_high) == pytest.approx((1 / 1.1, 1.1))
    assert forth.estimate == pytest.approx(1 / back.estimate)
    assert forth.ci_low == pytest.approx(1 / back.ci_high)
    assert forth.p_equivalence == pytest.approx(back.p_equivalence)


def test_a_ratio_is_of_geometric_means():
    comparison = compare_samples([1.0, 4.0, 2.0], [1.0, 1.1, 0.9], margin=0.1, scale="ratio")
    assert comparison.estimate == pytest.approx(2.0 / (0.99 ** (1 / 3)))


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ([1.0, 2.0], "n = 2"),
        ([1.0, 1.0, 1.0], "all 3 values are 1"),
        ([1.0, math.nan, 2.0], "not finite"),
        ([1.0, math.inf, 2.0], "not finite"),
        ([-1.0, 1.0, 2.0], "not positive"),
    ],
)
def test_data_that_allow_no_inference_are_refused(ours, message):
    with pytest.raises(NoInference, match=message):
        compare_samples(ours, [1.0, 2.0, 3.0], margin=0.1, scale="ratio")


@pytest.mark.parametrize(
    ("ours", "scale"), [([1e-300, 1.0, 1e300], "ratio"), ([1e300, 2e300, 3e300], "absolute")]
)
def test_numbers_beyond_what_a_float_holds_are_refused(ours, scale):
    with pytest.raises(NoInference, match="too far apart"):
        compare_samples(ours, [1.0, 2.0, 3.0], margin=0.1, scale=scale)


def test_a_spread_that_is_rounding_is_none():
    """0.1 + 0.2 is 0.30000000000000004."""
    with pytest.raises(NoInference, match="does not resolve"):
        compare_samples([0.1 + 0.2, 0.3, 0.3], [0.7 + 0.1, 0.8, 0.8], margin=0.6)


def test_a_relative_margin_of_ten_is_no_ten_percent():
    with pytest.raises(ValueError, match="write 0.1 for 10 %"):
        compare_samples([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], margin=10, scale="ratio")


def test_two_different_constants_are_refused_instead_of_p_0():
    """Six reference runs of a public benchmark are all 4608: the metric is quantised by its evaluation interval."""
    with pytest.raises(NoInference, match="does not resolve"):
        compare_samples([4608.0] * 6, [5120.0] * 6, margin=0.1)


@pytest.mark.parametrize("margin", [0.0, -0.1, math.nan, math.inf])
def test_a_margin_must_be_positive_and_finite(margin):
    with pytest.raises(ValueError, match="margin"):
        compare_samples([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], margin=margin)


def test_mean_interval_of_three_by_hand():
    """t(0.975, 2) = 4.302653; for 1, 2, 3 the standard error is 1 / sqrt(3)."""
    assert mean_interval([1, 2, 3]) == pytest.approx((2, 2 - 2.484138, 2 + 2.484138), abs=1e-6)
