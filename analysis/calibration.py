"""Which verdicts are false more often than they say, measured by simulation; warnings beside data that look like those.

The table beside this file comes from ``python -m tests.bench.calibration``; docs/calibration.md shows it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.inference import Comparison, Verdict

CELLS = Path(__file__).with_name("calibration.csv")
ALLOWED = 0.06
"""A false verdict more often than this earns a warning (nominal: 5 %)."""
TELLING = 0.8
"""Where fewer skewed samples than this show that they are, the warning is conditional."""
SKEWED = 0.8
"""Skewness of the pooled residuals from which data count as skewed. ``Cell.seen`` says how often exponential samples do."""


@dataclass(frozen=True)
class Cell:
    """How often each verdict was false for one shape of runs.

    n, n_baseline: runs of the arm with fewer and of the other. spread_ratio: where both have as many, larger over smaller;
    else that of the arm with fewer over the other's. paired: the shape is that of the differences, n counts pairs. seen:
    share of the samples that ``looks`` calls other than normal.
    """

    shape: str
    spread_ratio: float
    n: int
    n_baseline: int
    paired: bool
    false_different: float
    false_equivalent: float
    false_non_inferior: float
    seen: float
    draws: int

    def rate(self, verdict: Verdict) -> float:
        """How often DIFFERENT, EQUIVALENT or NON-INFERIOR was false."""
        return {
            Verdict.DIFFERENT: self.false_different,
            Verdict.EQUIVALENT: self.false_equivalent,
            Verdict.NON_INFERIOR: self.false_non_inferior,
        }[verdict]

    @property
    def shown(self) -> tuple[float, float]:
        """What a table shows: NON-INFERIOR goes with EQUIVALENT, whose one side it is."""
        return self.false_different, self.false_equivalent


@cache
def cells() -> tuple[Cell, ...]:
    """Every measured cell."""
    with open(CELLS, newline="") as file:
        return tuple(_cell(row) for row in csv.DictReader(file))


def _cell(row: dict[str, str]) -> Cell:
    rates = ("false_different", "false_equivalent", "false_non_inferior", "seen")
    return Cell(
        shape=row["shape"],
        spread_ratio=float(row["spread_ratio"]),
        paired=row["paired"] == "True",
        **{key: int(row[key]) for key in ("n", "n_baseline", "draws")},
        **{key: float(row[key]) for key in rates},
    )


def nearest(
    shape: str, spread_ratio: float, n: int, n_baseline: int | None = None, *, paired: bool = False
) -> Cell:
    """The measured cell of a shape: the largest n that is not above the fewer runs, the nearest n_baseline and ratio.

    spread_ratio: as in ``Cell``, of the arm with ``n`` runs over the other.
    """
    fewer, more = sorted((n, n if n_baseline is None else n_baseline))
    if n != fewer:
        spread_ratio = 1 / spread_ratio
    of_shape = [c for c in cells() if c.shape == shape and c.paired == paired]
    most = max(c.n for c in of_shape if c.n <= max(fewer, 3))
    of_n = [c for c in of_shape if c.n == most]
    many = _closest(more / fewer, {c.n_baseline / c.n for c in of_n})
    rows = [c for c in of_n if c.n_baseline / c.n == many]
    if many == 1:
        spread_ratio = max(spread_ratio, 1 / spread_ratio)
    ratio = _closest(spread_ratio, {c.spread_ratio for c in rows})
    return next(c for c in rows if c.spread_ratio == ratio)


def _closest(value: float, choices: Iterable[float]) -> float:
    within = min(max(value, 1e-6), 1e6)
    return min(choices, key=lambda choice: abs(math.log(choice / within)))


def looks(*samples: np.ndarray) -> np.ndarray:
    """normal, skewed (all arms one way) or opposed, by the skewness of each arm's residuals along the last axis."""
    residuals = [
        (s - s.mean(axis=-1, keepdims=True)) / s.std(axis=-1, keepdims=True) for s in samples
    ]
    pooled = stats.skew(np.concatenate(residuals, axis=-1), axis=-1)
    each = np.array([stats.skew(r, axis=-1) for r in residuals])
    opposed = (np.abs(each).min(axis=0) > SKEWED) & (each.prod(axis=0) < 0)
    if len(samples) == 1:
        opposed = np.zeros_like(opposed)
    return np.where(np.abs(pooled) > SKEWED, "skewed", np.where(opposed, "opposed", "normal"))


def shape_of(samples: Sequence[Sequence[float]], scale: str, *, paired: bool = False) -> str:
    """What the runs of two arms look like on the tested scale; where paired, what their differences look like."""
    tested = [np.log(s) if scale == "ratio" else np.asarray(s, dtype=float) for s in samples]
    return str(looks(tested[0] - tested[1]) if paired else looks(*tested))


def warnings(
    comparison: Comparison, samples: Sequence[Sequence[float]], verdict: Verdict
) -> list[str]:
    """What the simulations say of ``verdict`` on data like these, where it was false in more than 6 % of them."""
    if verdict not in (Verdict.DIFFERENT, Verdict.EQUIVALENT, Verdict.NON_INFERIOR):
        return []
    paired = comparison.paired
    shape = shape_of(samples, comparison.scale, paired=paired)
    ratio = 1.0 if paired else comparison.spread / comparison.spread_baseline
    where = (ratio, comparison.n, comparison.n_baseline)
    cell = nearest(shape, *where, paired=paired)
    false = f"{verdict} was false in {cell.rate(verdict):.1%} of simulated comparisons (nominal 5%)"
    if cell.rate(verdict) > ALLOWED:
        return [f"the data look {shape}{_spreads(cell)}; there, with {_runs(cell)}, {false}"]
    hidden = nearest("skewed", *where, paired=paired)
    if shape != "normal" or hidden.seen >= TELLING or hidden.rate(verdict) <= ALLOWED:
        return []
    false = (
        f"{verdict} was false in {hidden.rate(verdict):.1%} of simulated comparisons (nominal 5%)"
    )
    return [
        f"{_runs(cell)} cannot show whether they are skewed (of skewed ones {hidden.seen:.0%} do); if they are"
        f"{_spreads(hidden)}, {false}"
    ]


def _runs(cell: Cell) -> str:
    if cell.paired:
        return f"{cell.n} pairs"
    return f"{cell.n} and {cell.n_baseline} runs"


def _spreads(cell: Cell) -> str:
    if cell.paired:
        return ""
    if cell.spread_ratio == 1:
        return ", spreads equal"
    if cell.n == cell.n_baseline:
        return f", spreads {cell.spread_ratio:g}-fold apart"
    return f", the spread of the arm with fewer runs {cell.spread_ratio:g} times the other's"


@dataclass(frozen=True)
class Grid:
    """Cells as a table: one row a label, one column a heading."""

    title: str
    corner: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


ABOUT = {
    "normal": "what a t-test assumes",
    "skewed": "exponential, skewness 2 (times, say)",
    "opposed": "skewness 2 in one arm and -2 in the other",
    "heavy": "t with 3 degrees of freedom: now and then a run far off",
}


def grids(measured: Sequence[Cell]) -> list[Grid]:
    """Every cell once: as many runs a side by shape, unequal numbers by shape, pairs."""
    found = []
    for shape, about in ABOUT.items():
        equal = [c for c in measured if c.shape == shape and not c.paired and c.n == c.n_baseline]
        rows = _grouped(equal, lambda c: f"{c.spread_ratio:g}")
        title = f"{shape}: {about}"
        found.append(Grid(title, "spread ratio", _headings(equal, lambda c: f"n = {c.n}"), rows))
    for shape, about in ABOUT.items():
        unequal = [c for c in measured if c.shape == shape and c.n != c.n_baseline]
        if unequal:
            title = f"unequal numbers of runs, {shape}: {about}"
            corner = "runs; spread of the arm with fewer, over the other's"
            headings = _headings(unequal, lambda c: f"{c.spread_ratio:g}")
            rows = _grouped(unequal, lambda c: f"{c.n} and {c.n_baseline}")
            found.append(Grid(title, corner, headings, rows))
    pairs = [c for c in measured if c.paired]
    headings = _headings(pairs, lambda c: f"n = {c.n}")
    found.append(Grid("pairs", "differences are", headings, _grouped(pairs, lambda c: c.shape)))
    return found


def _headings(measured: Sequence[Cell], heading) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(heading, measured)))


def _grouped(measured: Sequence[Cell], label) -> tuple[tuple[str, tuple[Cell, ...]], ...]:
    names = dict.fromkeys(map(label, measured))
    return tuple((name, tuple(c for c in measured if label(c) == name)) for name in names)
