"""Time to a threshold, with runs that never reached it: they are censored, and no mean can be taken over them.

Where every run reached it the values are compared like any others. Where some did not, the log-rank test sees whether one
arm is faster, the fraction that reached it is shown, and equivalence cannot be claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class Crossing:
    """When a run reached the threshold: a step or seconds; ``reached`` False: it ended there without."""

    value: float
    reached: bool


@dataclass(frozen=True)
class Race:
    """Two arms' crossings with at least one censored. candidate_first: the candidate crosses earlier than expected."""

    reached: int
    n: int
    reached_baseline: int
    n_baseline: int
    p_logrank: float
    candidate_first: bool
    alpha: float

    @property
    def text(self) -> str:
        return (
            f"reached by {self.reached} of {self.n} runs against {self.reached_baseline} of {self.n_baseline} "
            "of the baseline"
        )


def race(ours: Sequence[Crossing], baseline: Sequence[Crossing], alpha: float) -> Race:
    """The log-rank test of two arms (Mantel 1966). Raises ValueError where no run of either arm crossed."""
    if not any(crossing.reached for crossing in (*ours, *baseline)):
        raise ValueError("no run of either arm reached the threshold")
    result = stats.logrank(_censored(ours), _censored(baseline))
    return Race(
        reached=sum(crossing.reached for crossing in ours),
        n=len(ours),
        reached_baseline=sum(crossing.reached for crossing in baseline),
        n_baseline=len(baseline),
        p_logrank=float(result.pvalue),
        candidate_first=bool(result.statistic > 0),
        alpha=alpha,
    )


def _censored(crossings: Sequence[Crossing]) -> stats.CensoredData:
    return stats.CensoredData(
        uncensored=[crossing.value for crossing in crossings if crossing.reached],
        right=[crossing.value for crossing in crossings if not crossing.reached],
    )
