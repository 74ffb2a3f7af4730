"""How many runs a claim needs, before the money is spent: power of Welch's test and of TOST, and smallest provable margins.

For normal runs the difference of means and the two variances are independent, so the power is the mean, over the two
chi-square laws of the variances, of a normal probability: computed on a fixed grid of their quantiles, without random
draws, and right for unequal spreads, where textbook formulas are not.

    python -m analysis.power                                            in units of the spread between runs
    python -m analysis.power experiments/moe_vl.yaml                    how small the spread must be for the margins to be shown
    python -m analysis.power experiments/moe_vl.yaml --pilot runs/moe_vl/tiny     with the spread that finished runs show
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from scipy import optimize, stats

from analysis.plan import Endpoint

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
class PilotSpread:
    """Spread between runs on the tested scale (logarithms for a ratio), of a candidate and the baseline, from a pilot."""

    candidate: str
    sd: float
    sd_baseline: float
    df: float


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


def largest_spread(n: int, margin: float, *, alpha: float = 0.05) -> float:
    """The spread between runs, equal in both arms, up to which ``n`` runs a side show equivalence with power 0.8."""
    return margin / power_table((n,), alpha=alpha)[0].smallest_margin


def outlook(endpoint: Endpoint, n: int, pilot: PilotSpread | None, *, alpha: float = 0.05) -> str:
    """One sentence before the money is spent: what ``n`` runs a side can show of an endpoint."""
    ratio = endpoint.scale == "ratio"
    margin = math.log1p(endpoint.margin) if ratio else endpoint.margin

    def shown(value: float) -> str:
        return f"{math.expm1(value):.1%}" if ratio else f"{value:.2g} {endpoint.unit}"

    within = f"±{endpoint.margin:.0%}" if ratio else f"±{endpoint.margin:g} {endpoint.unit}"
    if n < 3:
        return f"{endpoint.name}: {n} runs a side allow no inference; 3 is the least"
    if pilot is None:
        return (
            f"{endpoint.name}: {n} runs a side can show EQUIVALENT within {within} (power {TARGET_POWER:.0%}) where the "
            f"spread between runs is at most {shown(largest_spread(n, margin, alpha=alpha))}"
        )
    power = tost_power(n, pilot.sd, pilot.sd_baseline, margin, alpha=alpha)
    row = power_table((n,), pilot.sd, pilot.sd_baseline, alpha=alpha)[0]
    needed = needed_runs(pilot.sd, pilot.sd_baseline, pilot.df, margin, alpha=alpha)
    return (
        f"{endpoint.name}: with the pilot's spread ({pilot.candidate} {shown(pilot.sd)}, baseline "
        f"{shown(pilot.sd_baseline)}) {n} runs a side show EQUIVALENT within {within} with power {power:.0%}; the smallest "
        f"margin they can show is {shown(row.smallest_margin)}; {within} takes n = {needed}"
    )


def prospects(
    endpoints: Sequence[Endpoint], n: int, folder: Path, *, alpha: float = 0.05
) -> list[str]:
    """``outlook`` of every endpoint, with the spread of the runs of ``folder`` that are finished already."""
    from analysis import pilot  # here: it reads runs, which most plans have none of yet

    spreads: dict[str, list[PilotSpread]] = {}
    said = []
    if any(folder.glob("*/done.json")) and (folder / "plan.json").is_file():
        try:
            spreads = pilot.spreads(endpoints, folder)
        except ValueError as error:
            said.append(f"no pilot: {error}")
    return said + [
        outlook(endpoint, n, spread, alpha=alpha)
        for endpoint in endpoints
        for spread in spreads.get(endpoint.name) or [None]
    ]


def render_power_table(rows: Sequence[PowerRow], unit: str = "run SD", title: str = "") -> Table:
    """A rich table of ``power_table``; unit "ratio" shows logarithms as percentages."""

    def show(value: float) -> str:
        return f"{math.expm1(value):.1%}" if unit == "ratio" else f"{value:.3g} {unit}"

    title = escape(title) or f"What n runs a side can show (power {TARGET_POWER:.1f})"
    table = Table(title=title, title_justify="left")
    table.add_column("runs a side", justify="right")
    table.add_column("smallest margin for EQUIVALENT", justify="right")
    table.add_column("smallest difference for DIFFERENT", justify="right")
    own = rows[0].power_margin is not None
    if own:
        table.add_column("power: EQUIVALENT within the margin", justify="right")
        table.add_column("power: DIFFERENT by the margin", justify="right")
    for row in rows:
        powers = [f"{row.power_margin:.0%}", f"{row.power_difference:.0%}"] if own else []
        table.add_row(str(row.n), show(row.smallest_margin), show(row.smallest_difference), *powers)
    return table


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


def main(arguments: list[str] | None = None) -> int:
    """Print what runs can show; returns 1 with one clear line where the experiment or the pilot cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.power", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("experiment", nargs="?", type=Path, help="an experiment's YAML file")
    parser.add_argument("--scale", help="which scale's seeds (default: the experiment's own)")
    parser.add_argument("--pilot", type=Path, help="a folder with plan.json and finished runs")
    parser.add_argument("--runs", type=int, nargs="+", default=list(RUNS), help="n of the table")
    options = parser.parse_args(arguments)
    console = Console()
    from analysis import pilot  # here: a submit prints ``outlook`` without reading runs

    try:
        if options.experiment is None and options.pilot is None:
            console.print(render_power_table(power_table(options.runs)))
            return 0
        declared = pilot.declared(options.experiment, options.scale, options.pilot)
        spreads = pilot.spreads(declared.endpoints, options.pilot) if options.pilot else {}
        for endpoint in declared.endpoints:
            for spread in spreads.get(endpoint.name) or [None]:
                text = outlook(endpoint, len(declared.seeds), spread, alpha=declared.alpha)
                console.print(Text(text), soft_wrap=True)
                if spread is not None:
                    ratio = endpoint.scale == "ratio"
                    margin = math.log1p(endpoint.margin) if ratio else endpoint.margin
                    rows = power_table(
                        options.runs,
                        spread.sd,
                        spread.sd_baseline,
                        margin=margin,
                        alpha=declared.alpha,
                    )
                    unit = "ratio" if ratio else endpoint.unit
                    console.print(render_power_table(rows, unit, endpoint.name))
        if not spreads:
            console.print(render_power_table(power_table(options.runs, alpha=declared.alpha)))
    except ValueError as error:
        print(f"analysis.power: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
