"""Lost runs: exact intervals and ranks against values worked by hand."""

from __future__ import annotations

import pytest

from analysis.inference import compare_samples
from analysis.load import load_experiment
from analysis.lost import SuccessRate, fisher_p, worst_case
from analysis.verdict import judge
from tests.analysis.synthetic import write_experiment


def test_the_interval_of_three_of_three_is_clopper_and_pearsons():
    """All of n succeed: the lower bound is (alpha / 2) ** (1 / n), 0.2924 for n = 3."""
    assert SuccessRate(3, 3).interval == pytest.approx((0.025 ** (1 / 3), 1.0))


def test_uneven_loss_by_hand():
    """2 of 5 against 5 of 5: two-sided Fisher is 2 C(5,3) / C(10,3) = 1/6."""
    assert fisher_p([SuccessRate(2, 5), SuccessRate(5, 5)]) == pytest.approx(1 / 6)


def test_a_lost_run_ranks_below_every_finisher_whichever_way_is_better():
    """Candidate 3, 4 and one lost, baseline 1, 2, 2.5: it wins 6 of 9 pairings, so 0.667; lower is better: 0 of 9."""
    up = worst_case([3.0, 4.0], [1.0, 2.0, 2.5], 1, 0, "higher")
    down = worst_case([3.0, 4.0], [1.0, 2.0, 2.5], 1, 0, "lower")
    assert up.superiority == pytest.approx(6 / 9) and down.superiority == 0.0
    assert up.p_value == pytest.approx(0.7)  # exact: 2 * 7/20


def test_runs_lost_in_both_arms_tie():
    assert worst_case([], [], 2, 2, "higher").superiority == pytest.approx(0.5)


def test_without_a_lost_run_there_is_no_worst_case():
    assert worst_case([1.0, 2.0], [1.0], 0, 0, "higher") is None


def test_a_worst_case_that_points_the_other_way_disagrees():
    """Both finishers beat both of the baseline, but two of four were lost: 4 wins of 8 is no lead."""
    comparison = compare_samples([2.0, 2.1, 2.2], [1, 1.5, 2.05], margin=0.1, direction="higher")
    assert (
        worst_case([2.0, 2.1, 2.2], [1, 1.5, 2.05], 2, 0, "higher").disagrees(comparison) is False
    )
    assert worst_case([2.0, 2.1, 2.2], [1, 1.5, 2.05], 4, 0, "higher").disagrees(comparison) is True


def test_a_report_with_one_lost_run_keeps_the_finishers_and_says_the_worst_case(tmp_path):
    folder = write_experiment(tmp_path, steps=20, lost={("molt", 0): "oom"})
    result = judge(load_experiment(folder))[0]
    assert (result.comparison.n, result.comparison.n_baseline) == (4, 5)
    assert result.measurement.worst_case.lost == 1
    assert result.may_write.startswith(
        "Among the runs that finished (molt 4 of 5, megatron 5 of 5)"
    )
    assert "without the runs that were lost" in result.may_not_write
