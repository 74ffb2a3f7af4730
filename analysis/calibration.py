"""Which verdicts are false more often than they say, measured by simulation; warnings beside data that look like those.

The table beside this file comes from ``python -m tests.bench.calibration``; docs/calibration.md shows it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.inference import Comparison, Verdict

CELLS = Path(__file__).with_name("calibration.csv")
ALLOWED = 0.06
"""A false verdict more often than this earns a warning (nominal: 5 %)."""
TELLING_RUNS = 5
"""Below it a sample cannot show its skew, so the warning is conditional."""
SKEWED = 0.8
"""Skewness of the pooled residuals from which data count as skewed: 0.9 of exponential samples of 10 and 10 show it,
under 0.1 of normal ones."""


@dataclass(frozen=True)
class Cell:
    """How often each verdict was false for one shape, ratio of spreads, and n runs a side."""

    shape: str
    spread_ratio: float
    n: int
    false_different: float
    false_equivalent: float
    draws: int


@cache
def cells() -> tuple[Cell, ...]:
    """Every measured cell."""
    with open(CELLS, newline="") as file:
        return tuple(
            Cell(
                row["shape"],
                float(row["spread_ratio"]),
                int(row["n"]),
                float(row["false_different"]),
                float(row["false_equivalent"]),
                int(row["draws"]),
            )
            for row in csv.DictReader(file)
        )


def nearest(shape: str, spread_ratio: float, n: int) -> Cell:
    """The measured cell of a shape whose spread ratio is nearest and whose n is the largest that is not above ``n``."""
    ratio = min(
        {c.spread_ratio for c in cells()},
        key=lambda r: abs(math.log(r) - math.log(min(max(spread_ratio, 1.0), 1e6))),
    )
    runs = max(c.n for c in cells() if c.n <= max(n, 3))
    return next(c for c in cells() if (c.shape, c.spread_ratio, c.n) == (shape, ratio, runs))


def shape_of(samples: Sequence[Sequence[float]], scale: str) -> str:
    """normal, skewed (both arms one way) or opposed, by the skewness of each arm's residuals on the tested scale."""
    tested = [np.log(s) if scale == "ratio" else np.asarray(s, dtype=float) for s in samples]
    skews = [float(stats.skew(sample)) for sample in tested]
    residuals = np.concatenate([(sample - sample.mean()) / sample.std() for sample in tested])
    if abs(stats.skew(residuals)) > SKEWED:
        return "skewed"
    return "opposed" if min(map(abs, skews)) > SKEWED and skews[0] * skews[1] < 0 else "normal"


def warnings(
    comparison: Comparison, samples: Sequence[Sequence[float]], verdict: Verdict
) -> list[str]:
    """What the simulations say of ``verdict`` on data like these, where it was false in more than 6 % of them."""
    if comparison.paired or verdict not in (Verdict.DIFFERENT, Verdict.EQUIVALENT):
        return []
    n = min(comparison.n, comparison.n_baseline)
    shape = shape_of(samples, comparison.scale)
    hidden = n < TELLING_RUNS
    cell = nearest("skewed" if hidden else shape, comparison.spread_ratio, n)
    rate = cell.false_different if verdict == Verdict.DIFFERENT else cell.false_equivalent
    if rate <= ALLOWED:
        return []
    spreads = f"{cell.spread_ratio:g}-fold apart" if cell.spread_ratio > 1 else "equal"
    looks = f"{n} runs cannot show whether they are skewed; if they are, with spreads {spreads}"
    if not hidden:
        looks = f"the data look {shape}, spreads {spreads}; there, with n = {n}"
    return [f"{looks}, {verdict} was false in {rate:.1%} of simulated comparisons (nominal 5%)"]
