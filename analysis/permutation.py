"""An exact permutation test beside the t-test: what the runs say without an assumption of normality, where n allows it.

p = exact_p(ours, baseline, paired=False)
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

MOST_PERMUTATIONS = 50_000
"""Up to 9 runs a side, or 15 pairs; beyond that the t-test needs no witness."""
LEAST_P = 0.05
"""Where even the most extreme arrangement cannot reach it (3 against 3: p = 0.1) there is nothing to learn."""


def arrangements(n: int, n_baseline: int, *, paired: bool) -> int:
    """In how many ways the runs can lie over the arms, or the signs over the pairs."""
    return 2**n if paired else math.comb(n + n_baseline, n)


def smallest_p(n: int, n_baseline: int, *, paired: bool) -> float:
    """The p of the most extreme arrangement, two-sided."""
    return 2 / arrangements(n, n_baseline, paired=paired)


def exact_p(ours: np.ndarray, baseline: np.ndarray, *, paired: bool) -> float | None:
    """Two-sided p over all arrangements of the runs; None where they are too few to tell, or too many to visit.

    The statistic is studentised (Welch's t, or the paired one), which keeps the level for unequal spreads as n grows
    (Janssen 1997); with equal spreads the test is exact.
    """
    many = arrangements(len(ours), len(baseline), paired=paired)
    if 2 / many > LEAST_P or many > MOST_PERMUTATIONS:
        return None
    result = stats.permutation_test(
        (ours, baseline),
        _paired_t if paired else _welch_t,
        permutation_type="samples" if paired else "independent",
        n_resamples=np.inf,
        vectorized=True,
        batch=10_000,
    )
    return float(result.pvalue)


def _welch_t(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    error = np.sqrt(
        x.var(axis=axis, ddof=1) / x.shape[axis] + y.var(axis=axis, ddof=1) / y.shape[axis]
    )
    return _over(x.mean(axis=axis) - y.mean(axis=axis), error)


def _paired_t(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    d = x - y
    return _over(d.mean(axis=axis), d.std(axis=axis, ddof=1) / math.sqrt(d.shape[axis]))


def _over(difference: np.ndarray, error: np.ndarray) -> np.ndarray:
    """difference / error; without any spread an arrangement is as extreme as can be, or is no difference at all."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.asarray(difference / error), nan=0.0)
