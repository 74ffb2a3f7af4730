"""Two arms, one number a run: Welch's interval for DIFFERENT, TOST's for EQUIVALENT. Numbers only, no verdict.

scipy and statsmodels do the arithmetic, with their defaults set right (unequal variances). A ratio margin m means
[1 / (1 + m), 1 + m] on the ratio of geometric means, tested on the logarithms.

    comparison = compare_samples(ours, baseline, margin=0.1, scale="ratio")
    print(comparison)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from statsmodels.stats.weightstats import ttost_ind

LEAST_RUNS = 3


class NoInference(ValueError):
    """Data from which no interval may be made; the message says why in words for the report."""


@dataclass(frozen=True)
class Comparison:
    """Arm minus baseline (scale absolute) or arm over baseline (scale ratio), and everything needed to judge it.

    ``estimate``, the intervals and the bounds are in the unit of the endpoint, or ratios. ``spread`` and
    ``spread_baseline`` are standard deviations between runs on the tested scale (logarithms for a ratio).
    """

    n: int
    n_baseline: int
    mean: float
    mean_baseline: float
    sd: float
    sd_baseline: float
    scale: Literal["absolute", "ratio"]
    estimate: float
    ci_low: float
    ci_high: float
    level: float
    tost_low: float
    tost_high: float
    margin: float
    bound_low: float
    bound_high: float
    t: float
    df: float
    p_difference: float
    p_equivalence: float
    spread: float
    spread_baseline: float
    margin_from_data: bool = False

    @property
    def tested_margin(self) -> float:
        """The margin on the tested scale: the logarithm of 1 + m for a ratio."""
        return math.log1p(self.margin) if self.scale == "ratio" else self.margin

    @property
    def spread_ratio(self) -> float:
        """Larger spread over smaller."""
        low, high = sorted((self.spread, self.spread_baseline))
        return high / low if low else math.inf

    def __str__(self) -> str:
        sign = "ratio" if self.scale == "ratio" else "difference"
        return (
            f"{sign} {self.estimate:.4g}, {self.level:.0%} CI [{self.ci_low:.4g}, {self.ci_high:.4g}], "
            f"TOST interval [{self.tost_low:.4g}, {self.tost_high:.4g}] against [{self.bound_low:.4g}, "
            f"{self.bound_high:.4g}]; Welch t = {self.t:.2f}, df = {self.df:.1f}, p = {self.p_difference:.3g}; "
            f"TOST p = {self.p_equivalence:.3g}; n = {self.n} and {self.n_baseline}"
        )


def compare_samples(
    values: Sequence[float],
    baseline: Sequence[float],
    *,
    margin: float,
    scale: Literal["absolute", "ratio"] = "absolute",
    alpha: float = 0.05,
) -> Comparison:
    """Compare one number a run of two independent arms. ``margin``: in the unit, or relative for scale ratio.

    Raises NoInference for fewer than 3 runs an arm, values that are not finite, an arm without spread, or a ratio of
    values that are not positive; ValueError for a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"margin is {margin}; declare the largest difference that does not matter")
    ours, theirs = np.asarray(values, dtype=float), np.asarray(baseline, dtype=float)
    for name, sample in (("arm", ours), ("baseline", theirs)):
        _require_usable(name, sample, scale)
    tested = (np.log(ours), np.log(theirs)) if scale == "ratio" else (ours, theirs)
    bound = math.log1p(margin) if scale == "ratio" else margin
    welch = stats.ttest_ind(*tested, equal_var=False)
    p_equivalence, _, _ = ttost_ind(*tested, -bound, bound, usevar="unequal")
    interval = welch.confidence_interval(1 - alpha)
    tost = welch.confidence_interval(1 - 2 * alpha)
    back = math.exp if scale == "ratio" else float
    return Comparison(
        n=len(ours),
        n_baseline=len(theirs),
        mean=float(ours.mean()),
        mean_baseline=float(theirs.mean()),
        sd=float(ours.std(ddof=1)),
        sd_baseline=float(theirs.std(ddof=1)),
        scale=scale,
        estimate=back(tested[0].mean() - tested[1].mean()),
        ci_low=back(interval.low),
        ci_high=back(interval.high),
        level=1 - alpha,
        tost_low=back(tost.low),
        tost_high=back(tost.high),
        margin=margin,
        bound_low=back(-bound),
        bound_high=back(bound),
        t=float(welch.statistic),
        df=float(welch.df),
        p_difference=float(welch.pvalue),
        p_equivalence=float(p_equivalence),
        spread=float(tested[0].std(ddof=1)),
        spread_baseline=float(tested[1].std(ddof=1)),
    )


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) by Student's t over runs; low and high are NaN for fewer than 2 runs."""
    sample = np.asarray(values, dtype=float)
    mean = float(sample.mean())
    if len(sample) < 2:
        return mean, math.nan, math.nan
    half = stats.t.ppf((1 + level) / 2, len(sample) - 1) * stats.sem(sample)
    return mean, mean - half, mean + half


def stand_in_sample(mean: float, sd: float, n: int) -> np.ndarray:
    """``n`` values with exactly this mean and sample SD.

    Welch's test and TOST see a sample through its mean, SD and n alone, so published summary statistics can take the
    same path as runs.
    """
    if n < 2 or not sd > 0:
        raise NoInference(
            f"n = {n}, sd = {sd}: summary statistics need n of 2 or more and a spread"
        )
    shape = np.arange(n) - (n - 1) / 2
    return mean + sd * shape / shape.std(ddof=1)


def _require_usable(name: str, sample: np.ndarray, scale: str) -> None:
    if not np.isfinite(sample).all():
        raise NoInference(f"{name}: a value is not finite")
    if len(sample) < LEAST_RUNS:
        raise NoInference(
            f"{name}: n = {len(sample)}; no inference is made from fewer than {LEAST_RUNS} runs an arm"
        )
    if np.ptp(sample) == 0:
        raise NoInference(
            f"{name}: all {len(sample)} values are {sample[0]:g}: the metric does not resolve the spread between runs"
        )
    if scale == "ratio" and not (sample > 0).all():
        raise NoInference(
            f"{name}: a value is not positive, a ratio is undefined; use scale: absolute"
        )
