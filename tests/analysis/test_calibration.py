"""The measured table of false verdicts, and the warnings that are read from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.calibration import ALLOWED, cells, nearest, shape_of, warnings
from analysis.inference import Verdict, compare_samples
from analysis.load import load_experiment
from analysis.verdict import judge
from tests.analysis.synthetic import MEGATRON, MOLT, write_experiment
from tests.bench import calibration as study


def test_false_verdicts_of_normal_runs_are_at_most_six_percent():
    """The promise: spread ratios up to 5, every n from 3 to 20, with 100,000 draws a cell."""
    promised = [c for c in cells() if c.shape == "normal" and c.spread_ratio <= 5]
    assert {c.n for c in promised} == {3, 4, 5, 8, 10, 15, 20}
    for cell in promised:
        error = 2 * (0.05 * 0.95 / cell.draws) ** 0.5
        assert max(cell.false_different, cell.false_equivalent) <= 0.06 + error


@pytest.mark.parametrize(
    ("shape", "ratio", "n"),
    [
        ("normal", 1.0, 3),
        ("normal", 5.0, 3),
        ("skewed", 5.0, 5),
        ("opposed", 1.0, 10),
        ("heavy", 2.0, 4),
    ],
)
def test_the_committed_table_is_what_the_study_measures(shape, ratio, n):
    """4,000 fresh draws: within four of their standard errors of the committed 100,000."""
    committed, fresh = nearest(shape, ratio, n), study.measure(shape, ratio, n, 4000, seed=1)
    assert (committed.shape, committed.spread_ratio, committed.n) == (shape, ratio, n)
    for name in ("false_different", "false_equivalent"):
        rate = getattr(committed, name)
        error = (rate * (1 - rate) / 4000) ** 0.5
        assert getattr(fresh, name) == pytest.approx(rate, abs=4 * error)


def test_the_study_judges_as_the_report_does():
    random = np.random.default_rng(5)
    ours, theirs = random.normal(0.4, 1, (50, 4)), random.normal(0, 2, (50, 4))
    inside = study._equivalent(ours, theirs, 2.5)
    apart = study._different(ours, theirs)
    for x, y, equivalent, different in zip(ours, theirs, inside, apart):
        comparison = compare_samples(x, y, margin=2.5)
        assert (comparison.p_equivalence < 0.05) == equivalent
        assert (comparison.p_difference < 0.05) == different


def test_every_cell_above_the_bound_is_bold_in_the_document():
    text = study.document(list(cells()))
    bold = sum((c.false_different > ALLOWED) + (c.false_equivalent > ALLOWED) for c in cells())
    assert text.count("**") == 2 * bold
    assert study.DOCUMENT.read_text() == text


SKEWED = [0.1, 0.2, 0.3, 0.5, 0.9, 1.4, 0.15, 0.25, 4.0, 0.4]


def test_skewed_data_are_warned_of_with_the_measured_rate():
    wide = [5 * value for value in SKEWED]
    comparison = compare_samples(SKEWED, wide, margin=1.0)
    (warning,) = warnings(comparison, (SKEWED, wide), Verdict.DIFFERENT)
    measured = nearest("skewed", 5.0, 10).false_different
    assert "look skewed, spreads 5-fold" in warning
    assert f"DIFFERENT was false in {measured:.1%}" in warning
    assert warnings(comparison, (SKEWED, wide), Verdict.INCONCLUSIVE) == []


def test_normal_data_are_not_warned_of():
    ours = list(np.random.default_rng(0).normal(0, 1, 10))
    comparison = compare_samples(ours, [2 * x for x in ours], margin=1.0)
    assert shape_of((ours, ours), "absolute") == "normal"
    assert warnings(comparison, (ours, ours), Verdict.DIFFERENT) == []


def test_three_runs_cannot_show_their_skew_and_are_warned_of():
    ours, theirs = [1.0, 2.0, 3.0], [10.0, 25.0, 40.0]
    comparison = compare_samples(ours, theirs, margin=1.0)
    (warning,) = warnings(comparison, (ours, theirs), Verdict.DIFFERENT)
    assert "3 runs cannot show" in warning


def test_a_report_carries_the_warning_beside_its_verdict(tmp_path):
    arms = {"molt": replace(MOLT, step_log_sd=0.15), "megatron": replace(MEGATRON, step_s=6.0)}
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, arms=arms)
    result = judge(load_experiment(folder))[1]
    assert result.decision.verdict == Verdict.DIFFERENT
    assert any("3 runs cannot show whether" in caution for caution in result.cautions)
