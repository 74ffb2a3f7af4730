"""A sentence carries the p-value of the test that its verdict rests on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from analysis import wording
from analysis.inference import compare_samples
from tests.analysis.synthetic import ACCURACY

OURS, THEIRS = [0.90, 0.93, 0.88, 0.91], [0.89, 0.90, 0.92, 0.87]


@pytest.mark.parametrize(
    ("direction", "alternative", "sign"), [("higher", "greater", 1), ("lower", "less", -1)]
)
def test_the_one_sided_p_is_welchs_against_the_margin(direction, alternative, sign):
    """Second implementation: scipy's one-sided test of the samples moved by the margin."""
    comparison = compare_samples(OURS, THEIRS, margin=0.03, direction=direction)
    moved = np.array(OURS) + sign * 0.03
    right = stats.ttest_ind(moved, THEIRS, equal_var=False, alternative=alternative).pvalue
    assert comparison.p_non_inferiority == pytest.approx(right)


def test_the_one_sided_p_of_pairs_and_ratios():
    comparison = compare_samples(
        OURS, THEIRS, margin=0.05, scale="ratio", paired=True, direction="higher"
    )
    moved = np.log(OURS) + np.log(1.05)
    right = stats.ttest_rel(moved, np.log(THEIRS), alternative="greater").pvalue
    assert comparison.p_non_inferiority == pytest.approx(right)


def said(verdict: str, p_holm: float | None = None) -> str:
    comparison = compare_samples(OURS, THEIRS, margin=0.03, direction="higher")
    return wording.sentences(verdict, ACCURACY, "molt", "megatron", comparison, "", p_holm=p_holm)[
        0
    ]


def test_non_inferiority_shows_the_one_sided_p():
    comparison = compare_samples(OURS, THEIRS, margin=0.03, direction="higher")
    shown = wording.probability(comparison.p_non_inferiority)
    assert f"one-sided Welch {shown}" in said("NON-INFERIOR")
    assert "TOST" not in said("NON-INFERIOR") and "TOST" in said("EQUIVALENT")


def test_a_difference_of_a_primary_shows_the_p_that_decided():
    assert "after Holm's correction p = 0.044" in said("DIFFERENT", 0.044)
    assert "Holm" not in said("DIFFERENT") and "Holm" not in said("EQUIVALENT", 0.044)
