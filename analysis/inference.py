"""Two arms, one number a run: Welch's interval for DIFFERENT, TOST's for EQUIVALENT, and what these numbers alone support.

scipy and statsmodels do the arithmetic, with their defaults set right (unequal variances). A ratio margin m means
[1 / (1 + m), 1 + m] on the ratio of geometric means, tested on the logarithms. Validity, Holm's correction and what the
plan declared come later, in ``verdict.py``.

    comparison = compare_samples(ours, baseline, margin=0.1, scale="ratio")
    print(comparison)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from scipy import stats
from statsmodels.stats.weightstats import ttost_ind, ttost_paired

from analysis.permutation import exact_p
from analysis.sample_size import NeededRuns, needed_runs

LEAST_RUNS = 3
ROUNDING = 1e-12
"""A spread, or a difference, below this share of the values is rounding and none."""


class NoInference(ValueError):
    """Data from which no interval may be made; the message says why in words for the report."""


class Verdict(StrEnum):
    """The only words a report uses."""

    EQUIVALENT = "EQUIVALENT"
    NON_INFERIOR = "NON-INFERIOR"
    DIFFERENT = "DIFFERENT"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"


@dataclass(frozen=True)
class Comparison:
    """Arm minus baseline (scale absolute) or arm over baseline (scale ratio), and everything needed to judge it.

    ``estimate``, the intervals and the bounds are in the unit of the endpoint, or ratios. ``spread`` and
    ``spread_baseline`` are standard deviations between runs on the tested scale (logarithms for a ratio), and
    ``spread_of_differences`` the one of paired differences. Numbers are NaN where ``refused`` says why none may be made.
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
    paired: bool = False
    correlation: float | None = None
    spread_of_differences: float | None = None
    p_permutation: float | None = None
    direction: Literal["higher", "lower"] | None = None
    margin_from_data: bool = False
    refused: str = ""

    @property
    def alpha(self) -> float:
        return 1 - self.level

    @property
    def tested_margin(self) -> float:
        """The margin on the tested scale: the logarithm of 1 + m for a ratio."""
        return math.log1p(self.margin) if self.scale == "ratio" else self.margin

    @property
    def tested_spreads(self) -> tuple[float, float | None]:
        """What power depends on: the two arms' spreads, or that of the differences and None where paired."""
        if self.paired:
            return self.spread_of_differences, None
        return self.spread, self.spread_baseline

    @property
    def spread_ratio(self) -> float:
        """Larger spread over smaller."""
        low, high = sorted((self.spread, self.spread_baseline))
        return high / low if low else math.inf

    @property
    def relative(self) -> float | None:
        """The difference as a share of the baseline's mean; None where that is 0."""
        if self.scale == "ratio":
            return self.estimate - 1
        return self.estimate / abs(self.mean_baseline) if self.mean_baseline else None

    @property
    def p_non_inferiority(self) -> float | None:
        """One-sided p of "worse by the margin or more"; None where nobody said which way is better, or no test is made."""
        if self.direction is None or self.refused:
            return None
        to_tested = math.log if self.scale == "ratio" else float
        estimate, low, high = map(to_tested, (self.estimate, self.tost_low, self.tost_high))
        error = (high - low) / 2 / float(stats.t.ppf(self.level, self.df))
        sign = 1 if self.direction == "higher" else -1
        return float(stats.t.sf((sign * estimate + self.tested_margin) / error, self.df))

    @property
    def test(self) -> str:
        return "paired t" if self.paired else "Welch"

    @property
    def verdict(self) -> Verdict:
        """What the intervals alone support; the report puts validity before and Holm's correction over it."""
        if self.refused:
            few = min(self.n, self.n_baseline) < LEAST_RUNS
            return Verdict.INCONCLUSIVE if few else Verdict.INVALID
        if self.p_equivalence < self.alpha:
            return Verdict.EQUIVALENT
        return Verdict.DIFFERENT if self.p_difference < self.alpha else Verdict.INCONCLUSIVE

    @property
    def needed(self) -> NeededRuns | None:
        """Runs a side (pairs where paired) that would settle an INCONCLUSIVE; None for any other verdict."""
        if self.verdict != Verdict.INCONCLUSIVE:
            return None
        if self.refused:
            return NeededRuns(LEAST_RUNS, None, None)
        found = needed_runs(*self.tested_spreads, self.df, self.tested_margin, alpha=self.alpha)
        return found.at_least(min(self.n, self.n_baseline) + 1)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is not EQUIVALENT or DIFFERENT, or what else must be said with it."""
        found = [self.refused] if self.refused else []
        if self.margin_from_data:
            found.append(
                "the margin was estimated from data: a share of the observed baseline mean"
            )
        if self.needed and not self.refused:
            found.append(f"if the arms are truly equal, showing it takes n = {self.needed}")
        return tuple(found)

    def __str__(self) -> str:
        counts = f"n = {self.n} and {self.n_baseline}{' (paired)' if self.paired else ''}"
        if self.refused:
            return f"{self.verdict}: {self.refused}; {counts}"
        share = "" if self.relative is None or self.scale == "ratio" else f" ({self.relative:+.1%})"
        kind = "ratio" if self.scale == "ratio" else "difference"
        within = f" within [{self.bound_low:.4g}, {self.bound_high:.4g}]"
        resolved = self.verdict == Verdict.EQUIVALENT and self.p_difference < self.alpha
        lines = [
            f"{self.verdict}{within if self.verdict == Verdict.EQUIVALENT else self._side()}: "
            f"{kind} {self.estimate:.4g}{share}, {self.level:.0%} CI [{self.ci_low:.4g}, {self.ci_high:.4g}], "
            f"{counts}" + (" (the difference is resolved)" if resolved else ""),
            f"  {self.test} t = {self.t:.2f}, df = {self.df:.1f}, p = {self.p_difference:.2g}; "
            f"TOST{within} p = {self.p_equivalence:.2g}, "
            f"{2 * self.level - 1:.0%} CI [{self.tost_low:.4g}, {self.tost_high:.4g}]",
        ]
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])

    def _side(self) -> str:
        """ " (better)" where DIFFERENT and a direction was given; higher or lower without one."""
        if self.verdict != Verdict.DIFFERENT:
            return ""
        up = self.estimate > (1.0 if self.scale == "ratio" else 0.0)
        if self.direction is None:
            return f" ({'higher' if up else 'lower'})"
        return f" ({'better' if up == (self.direction == 'higher') else 'worse'})"


@np.errstate(
    over="ignore", divide="ignore", invalid="ignore"
)  # what is not finite is refused below
def compare_samples(
    values: Sequence[float],
    baseline: Sequence[float],
    *,
    margin: float,
    scale: Literal["absolute", "ratio"] = "absolute",
    alpha: float = 0.05,
    paired: bool = False,
    permutation: bool = False,
    direction: Literal["higher", "lower"] | None = None,
) -> Comparison:
    """Compare one number a run of two arms. ``margin``: in the unit, or relative for scale ratio.

    paired: values[i] and baseline[i] share a declared unit; the test is on their differences (statistics: paired t).
    permutation: also the exact permutation p where n allows one.
    Raises NoInference for fewer than 3 runs an arm, values that are not finite, an arm without spread, or a ratio of
    values that are not positive; ValueError for a margin that is not positive and finite, a ratio's of 1 or more, or pairs
    of unequal number.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin is {margin}; declare the largest difference that does not matter")
    if scale == "ratio" and margin >= 1:
        raise ValueError(
            f"margin is {margin:g}, as a ratio a factor of {1 + margin:g}; write 0.1 for 10 %"
        )
    ours, theirs = np.asarray(values, dtype=float), np.asarray(baseline, dtype=float)
    if ours.ndim != 1 or theirs.ndim != 1:
        raise ValueError("give one number a run: a flat list for each arm")
    if paired and len(ours) != len(theirs):
        raise ValueError(f"paired: {len(ours)} and {len(theirs)} values are no pairs")
    for name, sample in (("arm", ours), ("baseline", theirs)):
        _require_usable(name, sample, scale)
    tested = (np.log(ours), np.log(theirs)) if scale == "ratio" else (ours, theirs)
    bound = math.log1p(margin) if scale == "ratio" else margin
    if paired:
        differences = tested[0] - tested[1]
        if np.ptp(differences) <= ROUNDING * np.abs(differences).max():
            raise NoInference("all paired differences are equal: they give no spread to judge by")
        result = stats.ttest_rel(*tested)
        p_equivalence = ttost_paired(*tested, -bound, bound)[0]
    else:
        result = stats.ttest_ind(*tested, equal_var=False)
        p_equivalence = ttost_ind(*tested, -bound, bound, usevar="unequal")[0]
    interval = result.confidence_interval(1 - alpha)
    tost = result.confidence_interval(1 - 2 * alpha)
    back = _exp if scale == "ratio" else float
    found = Comparison(
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
        t=float(result.statistic),
        df=float(result.df),
        p_difference=float(result.pvalue),
        p_equivalence=float(p_equivalence),
        spread=float(tested[0].std(ddof=1)),
        spread_baseline=float(tested[1].std(ddof=1)),
        paired=paired,
        correlation=float(np.corrcoef(*tested)[0, 1]) if paired else None,
        spread_of_differences=float(differences.std(ddof=1)) if paired else None,
        p_permutation=exact_p(*tested, paired=paired) if permutation else None,
        direction=direction,
    )
    numbers = [value for value in vars(found).values() if isinstance(value, float)]
    if not all(map(math.isfinite, numbers)):
        raise NoInference(
            "the numbers are too large, or too far apart, for an interval between them"
        )
    return found


def refused_comparison(
    values: Sequence[float],
    baseline: Sequence[float],
    *,
    margin: float,
    scale: Literal["absolute", "ratio"],
    alpha: float,
    why: str,
) -> Comparison:
    """The comparison that may not be made: counts, margin and the reason; every other number is NaN."""
    none = math.nan
    low, high = (1 / (1 + margin), 1 + margin) if scale == "ratio" else (-margin, margin)
    return Comparison(
        len(values), len(baseline), none, none, none, none, scale, none, none, none, 1 - alpha, none, none,
        margin, low, high, none, none, none, none, none, none, refused=why,
    )  # fmt: skip


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


def _exp(value: float) -> float:
    """The exponential, infinite where it is larger than a float can be."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _require_usable(name: str, sample: np.ndarray, scale: str) -> None:
    if not np.isfinite(sample).all():
        raise NoInference(f"{name}: a value is not finite")
    if len(sample) < LEAST_RUNS:
        raise NoInference(
            f"{name}: n = {len(sample)}; no inference is made from fewer than {LEAST_RUNS} runs an arm"
        )
    if np.ptp(sample) <= ROUNDING * np.abs(sample).max():
        raise NoInference(
            f"{name}: all {len(sample)} values are {sample[0]:g}: the metric does not resolve the spread between runs"
        )
    if scale == "ratio" and not (sample > 0).all():
        raise NoInference(
            f"{name}: a value is not positive, a ratio is undefined; use scale: absolute"
        )
