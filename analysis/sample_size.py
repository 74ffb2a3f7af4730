"""Power of Welch's test, of TOST and of non-inferiority for normal runs, and the runs that a claim needs.

The difference of means and the two variances are independent, so the power is the mean, over the two chi-square laws of the
variances, of a normal probability: computed on a fixed grid of their quantiles, without random draws, and right for unequal
spreads, where textbook formulas are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, stats

TARGET_POWER = 0.8
MAX_RUNS = 10_000
RUNS = (3, 4, 5, 8, 10, 15, 20)
SPREAD_LEVEL = 0.8
"""Level of the spread's own interval in a range of needed runs: at n = 3 a 95 % one spans a factor of 12."""


def tost_power(
    n: int,
    sd: float,
    sd_baseline: float | None,
    margin: float,
    *,
    difference: float = 0.0,
    alpha: float = 0.05,
) -> float:
    """Probability that Welch's TOST shows |difference| < margin with ``n`` normal runs a side (Schuirmann 1987).

    All of sd, margin and difference are in one unit (for a ratio endpoint: of the logarithm). ``sd_baseline`` None: sd is
    that of paired differences, n counts pairs; the same holds for the other functions of power here.
    """
    standard_error, critical, scale = _grid(n, sd, sd_baseline, 1 - alpha)
    half_width = margin - critical * standard_error
    inside = stats.norm.cdf((half_width - difference) / scale) - stats.norm.cdf(
        (-half_width - difference) / scale
    )
    return float(np.where(half_width > 0, inside, 0.0).mean())


def non_inferiority_power(
    n: int,
    sd: float,
    sd_baseline: float | None,
    margin: float,
    *,
    difference: float = 0.0,
    alpha: float = 0.05,
) -> float:
    """Probability that the one-sided test shows "not worse by more than margin"; ``difference`` > 0 is better."""
    standard_error, critical, scale = _grid(n, sd, sd_baseline, 1 - alpha)
    return float(stats.norm.sf((critical * standard_error - margin - difference) / scale).mean())


def welch_power(
    n: int, sd: float, sd_baseline: float | None, difference: float, *, alpha: float = 0.05
) -> float:
    """Probability that Welch's two-sided test sees a true ``difference`` with ``n`` normal runs a side."""
    standard_error, critical, scale = _grid(n, sd, sd_baseline, 1 - alpha / 2)
    beyond = critical * standard_error
    above = stats.norm.sf((beyond - difference) / scale)
    below = stats.norm.cdf((-beyond - difference) / scale)
    return float((above + below).mean())


def runs_for_equivalence(
    sd: float,
    sd_baseline: float | None,
    margin: float,
    *,
    alpha: float = 0.05,
    power: float = TARGET_POWER,
) -> int | None:
    """Least runs a side for TOST to reach ``power`` where the arms are truly equal; None above 10,000."""
    return _least_n(lambda n: tost_power(n, sd, sd_baseline, margin, alpha=alpha), power)


def runs_for_non_inferiority(
    sd: float,
    sd_baseline: float | None,
    margin: float,
    *,
    alpha: float = 0.05,
    power: float = TARGET_POWER,
) -> int | None:
    """Least runs a side to show non-inferiority with ``power`` where the arms are truly equal; None above 10,000."""
    return _least_n(lambda n: non_inferiority_power(n, sd, sd_baseline, margin, alpha=alpha), power)


def runs_for_difference(
    sd: float,
    sd_baseline: float | None,
    difference: float,
    *,
    alpha: float = 0.05,
    power: float = TARGET_POWER,
) -> int | None:
    """Least runs a side for Welch's test to see ``difference`` with ``power``; None above 10,000."""
    return _least_n(lambda n: welch_power(n, sd, sd_baseline, difference, alpha=alpha), power)


@dataclass(frozen=True)
class PilotSpread:
    """Spread between runs on the tested scale (logarithms for a ratio), of a candidate and the baseline, from a pilot."""

    candidate: str
    sd: float
    sd_baseline: float
    df: float


@dataclass(frozen=True)
class NeededRuns:
    """Runs a side that would settle equivalence: at the lower bound of the spread, its estimate, its upper bound.

    None stands for more than 10,000.
    """

    low: int | None
    estimate: int | None
    high: int | None

    def at_least(self, n: int) -> NeededRuns:
        """The same range, cut at ``n`` from below."""
        return NeededRuns(
            *(m if m is None else max(m, n) for m in (self.low, self.estimate, self.high))
        )

    def __str__(self) -> str:
        low, estimate, high = (
            f"more than {MAX_RUNS:,}" if n is None else str(n)
            for n in (self.low, self.estimate, self.high)
        )
        return f"{low} a side" if low == high else f"{estimate} a side, range {low} to {high}"


def spread_factors(df: float) -> tuple[float, float]:
    """(low, high): by how much the true spread may differ from the one seen, its 80 % chi-square interval."""
    tail = (1 - SPREAD_LEVEL) / 2
    return (
        math.sqrt(df / stats.chi2.ppf(1 - tail, df)),
        math.sqrt(df / stats.chi2.ppf(tail, df)),
    )


def needed_runs(
    sd: float,
    sd_baseline: float | None,
    df: float,
    margin: float,
    *,
    alpha: float = 0.05,
    one_sided: bool = False,
) -> NeededRuns:
    """Runs a side that TOST needs at a true difference of 0, with the chi-square interval of the spread (80 %).

    df: degrees of freedom of the pooled spread, Welch-Satterthwaite's where the spreads differ. one_sided: for
    non-inferiority in place of equivalence.
    """
    count = runs_for_non_inferiority if one_sided else runs_for_equivalence
    low, high = spread_factors(df)
    factors = (low, 1.0, high)
    return NeededRuns(
        *(
            count(sd * f, None if sd_baseline is None else sd_baseline * f, margin, alpha=alpha)
            for f in factors
        )
    )


@dataclass(frozen=True)
class PowerRow:
    """What ``n`` runs a side can show: with power 0.8 the smallest margin and difference, in the unit of the spread.

    power_margin: power to show equivalence within the endpoint's own margin; power_difference: to see a difference as
    large as it. None without a margin.
    """

    n: int
    smallest_margin: float
    smallest_difference: float
    power_margin: float | None = None
    power_difference: float | None = None


def power_table(
    runs: Sequence[int] = RUNS,
    spread: float = 1.0,
    spread_baseline: float | None = None,
    *,
    margin: float | None = None,
    alpha: float = 0.05,
    power: float = TARGET_POWER,
) -> tuple[PowerRow, ...]:
    """Smallest provable margin (TOST, arms truly equal) and smallest visible difference (Welch) for each n.

    ``spread`` is the standard deviation between runs; 1.0 gives the table in units of it. margin: on the scale of the
    spread. Raises ValueError for n < 3.
    """
    if min(runs) < 3:
        raise ValueError(f"n = {min(runs)}: no inference is made from fewer than 3 runs a side")
    other = spread if spread_baseline is None else spread_baseline
    largest = max(spread, other)
    rows = []
    for n in runs:
        smallest, difference = (
            optimize.brentq(lambda x, n=n, f=f: f(n, spread, other, x, alpha=alpha) - power, 0, 100 * largest)
            for f in (tost_power, welch_power)
        )  # fmt: skip
        own = [
            None if margin is None else f(n, spread, other, margin, alpha=alpha)
            for f in (tost_power, welch_power)
        ]
        rows.append(PowerRow(n, smallest, difference, *own))
    return tuple(rows)


def smallest_margin(
    n: int, sd: float, sd_baseline: float, *, one_sided: bool = False, alpha: float = 0.05
) -> float:
    """The smallest margin that ``n`` runs a side show with power 0.8 where the arms are truly equal."""
    power_of = non_inferiority_power if one_sided else tost_power
    return optimize.brentq(
        lambda m: power_of(n, sd, sd_baseline, m, alpha=alpha) - TARGET_POWER,
        0,
        100 * max(sd, sd_baseline),
    )


@lru_cache(maxsize=4096)
def _grid(
    n: int, sd: float, sd_baseline: float | None, quantile: float, points: int = 96
) -> tuple[np.ndarray, np.ndarray, float]:
    """(standard errors, critical t values) over a grid of the variances' quantiles, and the true standard error."""
    if n < 2:
        raise ValueError(f"n = {n}: a spread needs two runs")
    levels = (np.arange(points) + 0.5) / points
    factor = stats.chi2.ppf(levels, n - 1) / (n - 1)
    if sd_baseline is None:
        error = sd / math.sqrt(n)
        return error * np.sqrt(factor), stats.t.ppf(quantile, n - 1), error
    first = (sd**2 / n * factor)[:, None]
    second = (sd_baseline**2 / n * factor)[None, :]
    total = first + second
    df = total**2 / ((first**2 + second**2) / (n - 1))
    return np.sqrt(total), stats.t.ppf(quantile, df), math.sqrt((sd**2 + sd_baseline**2) / n)


def _least_n(power_of, target: float) -> int | None:
    """Smallest n >= 3 whose power reaches the target: doubling, then bisection (power rises with n)."""
    low, high = 2, 3
    while power_of(high) < target:
        if high == MAX_RUNS:
            return None
        low, high = high, min(2 * high, MAX_RUNS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle) >= target else (middle, high)
    return high
