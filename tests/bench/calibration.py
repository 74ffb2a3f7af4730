"""How often is a verdict false? A simulation study of the tests that the verdicts rest on, over shapes, spreads and n.

    python -m tests.bench.calibration                 measures every cell (about two minutes) and rewrites
                                                      analysis/calibration.csv and docs/calibration.md

DIFFERENT is false where the arms' true means are equal; EQUIVALENT is false where they differ by exactly the margin, the
hardest case there is. The margin is ten true standard errors, so that the interval's width hides nothing. The report reads
the table and warns beside a verdict whose data look like a cell with more than 6 % false verdicts.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from scipy import stats

from analysis.calibration import ALLOWED, CELLS, Cell

ALPHA = 0.05
DRAWS = 100_000
MARGIN = 10.0
"""True standard errors."""
RUNS = (3, 4, 5, 8, 10, 15, 20)
SPREADS = (1.0, 2.0, 3.0, 5.0, 10.0)
DOCUMENT = Path(__file__).parents[2] / "docs" / "calibration.md"


@dataclass(frozen=True)
class Shape:
    """A truth with mean 0 and SD 1 for each arm. ``about``: what it stands for."""

    draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
    draw_baseline: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
    about: str


def _normal(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_normal(size)


def _exponential(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_exponential(size) - 1.0


def _reversed(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return 1.0 - random.standard_exponential(size)


def _heavy(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_t(3, size) / np.sqrt(3.0)


SHAPES = {
    "normal": Shape(_normal, _normal, "what a t-test assumes"),
    "skewed": Shape(_exponential, _exponential, "both arms exponential, skewness 2 (times, say)"),
    "opposed": Shape(_exponential, _reversed, "skewness 2 in one arm and -2 in the other"),
    "heavy": Shape(_heavy, _heavy, "t with 3 degrees of freedom: now and then a run far off"),
}


def measure(shape: str, spread_ratio: float, n: int, draws: int, seed: int = 0) -> Cell:
    """The false verdicts of one cell; the baseline has the larger spread."""
    random = np.random.default_rng([seed, sorted(SHAPES).index(shape), n, int(10 * spread_ratio)])
    truth = SHAPES[shape]
    ours = truth.draw(random, (draws, n))
    theirs = spread_ratio * truth.draw_baseline(random, (draws, n))
    margin = MARGIN * np.sqrt((1 + spread_ratio**2) / n)
    different = _different(ours, theirs)
    wrong = [_equivalent(ours + side * margin, theirs, margin).mean() for side in (-1, 1)]
    return Cell(shape, spread_ratio, n, float(different.mean()), float(max(wrong)), draws)


def _different(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Does Welch's interval exclude no difference? One answer a row."""
    return stats.ttest_ind(ours, theirs, axis=1, equal_var=False).pvalue < ALPHA


def _equivalent(ours: np.ndarray, theirs: np.ndarray, margin: float) -> np.ndarray:
    """Does TOST's interval lie inside the margin? One answer a row."""
    result = stats.ttest_ind(ours, theirs, axis=1, equal_var=False)
    interval = result.confidence_interval(1 - 2 * ALPHA)
    return (interval.low > -margin) & (interval.high < margin)


def study(draws: int = DRAWS) -> Iterator[Cell]:
    for shape in SHAPES:
        for spread_ratio in SPREADS:
            for n in RUNS:
                yield measure(shape, spread_ratio, n, draws)


def document(cells: list[Cell]) -> str:
    """The study as a Markdown page: one table a shape, DIFFERENT / EQUIVALENT in per cent."""
    error = 100 * np.sqrt(ALPHA * (1 - ALPHA) / cells[0].draws)
    lines = [
        "# How often a verdict is false",
        "",
        f"Measured by `python -m tests.bench.calibration`: {cells[0].draws:,} simulated comparisons a cell, Monte Carlo "
        f"standard error {error:.2f} percentage points at 5 %. Each entry: how often DIFFERENT was given with equal true "
        "means / how often EQUIVALENT was given with a true difference of exactly the margin, in per cent (nominal 5). "
        f"Above {ALLOWED:.0%} an entry is bold, and a report whose data look like that cell says so beside its verdict.",
    ]
    for name, shape in SHAPES.items():
        lines += ["", f"## {name}: {shape.about}", ""]
        lines.append("| spread ratio | " + " | ".join(f"n = {n}" for n in RUNS) + " |")
        lines.append("|---:|" + "---:|" * len(RUNS))
        for ratio in SPREADS:
            row = [c for c in cells if c.shape == name and c.spread_ratio == ratio]
            entries = [f"{_mark(c.false_different)} / {_mark(c.false_equivalent)}" for c in row]
            lines.append(f"| {ratio:g} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


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
