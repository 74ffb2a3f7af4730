"""How often is a verdict false? A simulation study of the tests that the verdicts rest on, over shapes, spreads and n.

    python -m tests.bench.calibration                 measures every cell (a few minutes) and rewrites
                                                      analysis/calibration.csv and docs/calibration.md

DIFFERENT is false where the arms' true means are equal; EQUIVALENT is false where they differ by exactly the margin, the
hardest case there is, and NON-INFERIOR where the candidate is worse by it. The margin is ten true standard errors, so that
the interval's width hides nothing. The report reads the table and warns beside a verdict whose data look like a cell with
more than 6 % false verdicts.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.calibration import ABOUT, ALLOWED, CELLS, Cell, grids, looks

ALPHA = 0.05
DRAWS = 100_000
MARGIN = 10.0
"""True standard errors."""
RUNS = (3, 4, 5, 8, 10, 15, 20)
SPREADS = (1.0, 2.0, 3.0, 5.0, 10.0)
UNEQUAL_RUNS = tuple(
    (few, many) for few in (3, 4, 5, 8, 10) for many in (4, 5, 8, 10, 20) if few < many
)
UNEQUAL_SPREADS = (0.2, 0.5, 1.0, 2.0, 5.0)
DOCUMENT = Path(__file__).parents[2] / "docs" / "calibration.md"

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _normal(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_normal(size)


def _exponential(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_exponential(size) - 1.0


def _reversed(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return 1.0 - random.standard_exponential(size)


def _heavy(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_t(3, size) / np.sqrt(3.0)


SHAPES: dict[str, tuple[Draw, Draw]] = {
    "normal": (_normal, _normal),
    "skewed": (_exponential, _exponential),
    "opposed": (_exponential, _reversed),
    "heavy": (_heavy, _heavy),
}
"""Truths with mean 0 and SD 1, for the arm with fewer runs and for the other."""


def measure(
    shape: str,
    spread_ratio: float,
    n: int,
    n_baseline: int | None = None,
    *,
    paired: bool = False,
    draws: int = DRAWS,
    seed: int = 0,
) -> Cell:
    """The false verdicts of one cell. Without n_baseline both arms have n runs, and the baseline the larger spread."""
    other = n if n_baseline is None else n_baseline
    key = [seed, sorted(SHAPES).index(shape), n, other, int(10 * spread_ratio), paired]
    random = np.random.default_rng(key)
    first, second = SHAPES[shape]
    scale = spread_ratio if n == other else 1 / spread_ratio
    ours = first(random, (draws, n))
    samples = (ours,) if paired else (ours, scale * second(random, (draws, other)))
    error = np.sqrt(1 / n + (0 if paired else scale**2 / other))
    p_value, low, high = _test(*samples)
    margin = MARGIN * error
    equivalent, not_worse = [], []
    for shift in (-margin, margin):
        equivalent.append(((low + shift > -margin) & (high + shift < margin)).mean())
    for beyond in (low - margin > -margin, high + margin < margin):
        not_worse.append(beyond.mean())
    return Cell(
        shape=shape,
        spread_ratio=spread_ratio,
        n=n,
        n_baseline=other,
        paired=paired,
        false_different=float((p_value < ALPHA).mean()),
        false_equivalent=float(max(equivalent)),
        false_non_inferior=float(max(not_worse)),
        seen=float((looks(*(s[:SEEN_DRAWS] for s in samples)) != "normal").mean()),
        draws=draws,
    )


SEEN_DRAWS = 20_000
"""How many of the draws are looked at for their shape."""


def _test(*samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p of no difference and the interval of TOST, one a row: Welch's, or the paired one of a single array."""
    if len(samples) == 1:
        result = stats.ttest_1samp(samples[0], 0.0, axis=1)
    else:
        result = stats.ttest_ind(*samples, axis=1, equal_var=False)
    interval = result.confidence_interval(1 - 2 * ALPHA)
    return result.pvalue, interval.low, interval.high


def study(draws: int = DRAWS) -> Iterator[Cell]:
    for shape in SHAPES:
        for spread_ratio in SPREADS:
            for n in RUNS:
                yield measure(shape, spread_ratio, n, draws=draws)
    for shape in ("normal", "skewed", "opposed"):
        for few, many in UNEQUAL_RUNS:
            for spread_ratio in UNEQUAL_SPREADS:
                yield measure(shape, spread_ratio, few, many, draws=draws)
    for shape in ("normal", "skewed", "heavy"):
        for n in RUNS:
            yield measure(shape, 1.0, n, paired=True, draws=draws)


def document(cells: list[Cell]) -> str:
    """The study as a Markdown page: one table a shape, DIFFERENT / EQUIVALENT in per cent."""
    error = 100 * np.sqrt(ALPHA * (1 - ALPHA) / cells[0].draws)
    apart = 100 * max(abs(c.false_non_inferior - c.false_equivalent) for c in cells)
    lines = [
        "# How often a verdict is false",
        "",
        f"Measured by `python -m tests.bench.calibration`: {cells[0].draws:,} simulated comparisons a cell, Monte Carlo "
        f"standard error {error:.2f} percentage points at 5 %. Each entry: how often DIFFERENT was given with equal true "
        "means / EQUIVALENT with a true difference of exactly the margin, in per cent (nominal 5). NON-INFERIOR with a "
        "candidate worse by exactly the margin was false as often as EQUIVALENT, whose one side it is, within "
        f"{apart:.2f} points in every cell. Above {ALLOWED:.0%} a figure is bold, and a report whose data look like that "
        "cell says so beside its verdict. Not in these tables: runs that ended before a threshold, which are judged by "
        "permutation (`analysis/thresholds.py`): exact for arms of one law, whatever n.",
    ]
    for grid in grids(cells):
        lines += ["", f"## {grid.title}", ""]
        lines.append(f"| {grid.corner} | " + " | ".join(grid.headings) + " |")
        lines.append("|---:|" + "---:|" * len(grid.headings))
        for label, row in grid.rows:
            entries = [" / ".join(map(_mark, cell.shown)) for cell in row]
            lines.append(f"| {label} | " + " | ".join(entries) + " |")
    return "\n".join([*lines, *_seen(cells)]) + "\n"


def _seen(cells: list[Cell]) -> list[str]:
    """How often the shape shows: what a warning can know."""
    lines = [
        "",
        "## how often a shape shows",
        "",
        "Per cent of the samples that look other than normal to the report. Where under 80 % of the skewed ones do, the "
        "warning beside a verdict on normal-looking data is conditional: runs so few cannot show their skew.",
        "",
        "| truth | " + " | ".join(f"n = {n}" for n in RUNS) + " |",
        "|---|" + "---:|" * len(RUNS),
    ]
    for paired in (False, True):
        for shape in ABOUT:
            row = [
                c
                for c in cells
                if (c.shape, c.paired, c.spread_ratio) == (shape, paired, 1.0)
                and c.n == c.n_baseline
            ]
            if row:
                label = f"{shape} differences of pairs" if paired else f"{shape} runs a side"
                lines.append(f"| {label} | " + " | ".join(f"{c.seen:.0%}" for c in row) + " |")
    return lines


def _mark(rate: float) -> str:
    text = f"{100 * rate:.1f}"
    return f"**{text}**" if rate > ALLOWED else text


def main() -> None:
    cells = list(study())
    with open(CELLS, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Cell)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)
    DOCUMENT.write_text(document(cells))
    print(DOCUMENT.read_text())


if __name__ == "__main__":
    main()
