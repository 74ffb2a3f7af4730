"""Runs that were lost cannot enter a mean. What became of them is an endpoint of its own, and a worst case of the others.

The primary analysis is the value among finishers and the success rate, side by side. The sensitivity analysis ranks every
lost run below all finishers and asks Mann-Whitney whether the arms still look as they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from analysis.inference import Comparison
from analysis.wording import probability


@dataclass(frozen=True)
class SuccessRate:
    """Finished runs of an arm with the exact 95 % interval (Clopper and Pearson 1934)."""

    finished: int
    planned: int

    @property
    def interval(self) -> tuple[float, float]:
        if not self.planned:
            return 0.0, 1.0
        low, high = proportion_confint(self.finished, self.planned, method="beta")
        return float(low), float(high)


@dataclass(frozen=True)
class WorstCase:
    """Mann-Whitney with every lost run ranked worst.

    p_value: two-sided. superiority: probability that a run of the candidate beats one of the baseline, ties half.
    """

    lost: int
    p_value: float
    superiority: float

    def disagrees(self, comparison: Comparison) -> bool:
        """True where the ranks point the other way than the means among finishers, or the lost run was decisive."""
        neutral = 1.0 if comparison.scale == "ratio" else 0.0
        better = (comparison.estimate > neutral) == (comparison.direction == "higher")
        return (self.superiority > 0.5) != better

    @property
    def text(self) -> str:
        return (
            f"with {self.lost} lost run{'s' * (self.lost > 1)} ranked worst the candidate is better with probability "
            f"{self.superiority:.2f} (Mann-Whitney {probability(self.p_value)}): the other way than the finishers"
        )


def success_rates(
    finished: Mapping[str, int], planned: Mapping[str, int]
) -> dict[str, SuccessRate]:
    """Arm -> its rate."""
    return {name: SuccessRate(finished[name], planned[name]) for name in planned}


def fisher_p(rates: Sequence[SuccessRate]) -> float:
    """Two-sided p of uneven loss between two arms (Fisher's exact test)."""
    table = [[r.finished for r in rates], [r.planned - r.finished for r in rates]]
    return float(stats.fisher_exact(table).pvalue)


def worst_case(
    values: Sequence[float],
    baseline: Sequence[float],
    lost: int,
    lost_baseline: int,
    direction: str,
) -> WorstCase | None:
    """Ranks with the lost runs last; None where none was lost or an arm has no run at all."""
    if not lost + lost_baseline or not (len(values) + lost) or not (len(baseline) + lost_baseline):
        return None
    sign = 1.0 if direction == "higher" else -1.0
    good = [sign * np.asarray(side, dtype=float) for side in (values, baseline)]
    floor = min(side.min() for side in good if len(side)) - 1.0 if any(map(len, good)) else 0.0
    ours, theirs = (
        np.concatenate([side, np.full(count, floor)])
        for side, count in zip(good, (lost, lost_baseline))
    )
    method = "exact" if len(np.unique([*ours, *theirs])) == len(ours) + len(theirs) else "auto"
    result = stats.mannwhitneyu(ours, theirs, method=method)
    return WorstCase(
        lost + lost_baseline,
        float(result.pvalue),
        float(result.statistic / (len(ours) * len(theirs))),
    )
