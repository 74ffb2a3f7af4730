"""The verdict of an endpoint: validity first, then intervals, and only these five words.

EQUIVALENT within m | NON-INFERIOR within m | DIFFERENT | INCONCLUSIVE | INVALID. Never from p > 0.05, never from
overlapping bars. DIFFERENT asks Welch's interval (Holm over the declared primaries), EQUIVALENT asks TOST's.

    for result in judge(load_experiment("runs/moe_vl/tiny")):
        print(result.decision.headline, result.may_write)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statsmodels.stats.multitest import multipletests

from analysis import wording
from analysis.checks import Pair
from analysis.endpoint import Endpoint
from analysis.inference import LEAST_RUNS, Comparison, Verdict
from analysis.load import Experiment
from analysis.measurement import Measurement, measure
from analysis.robustness import Omission, cautions, leave_one_out, race_cautions
from analysis.sample_size import NeededRuns, needed_runs


@dataclass(frozen=True)
class Decision:
    """A verdict, its detail ("within ±0.03", "better, +9 %", "needs n = ...") and why.

    needed: runs a side that would settle an INCONCLUSIVE, None where runs would not.
    """

    verdict: Verdict
    detail: str
    reasons: tuple[str, ...] = ()
    needed: NeededRuns | None = None

    @property
    def headline(self) -> str:
        within = self.detail.startswith("within")
        return f"{self.verdict} {self.detail}" if within else f"{self.verdict} ({self.detail})"


@dataclass(frozen=True)
class EndpointResult:
    """What may be said about one endpoint of one candidate against the baseline.

    omissions: the verdict without each run in turn (unadjusted p).
    """

    measurement: Measurement
    p_holm: float | None
    decision: Decision
    omissions: tuple[Omission, ...]
    cautions: tuple[str, ...]
    may_write: str
    may_not_write: str

    @property
    def endpoint(self) -> Endpoint:
        return self.measurement.endpoint

    @property
    def comparison(self) -> Comparison | None:
        return self.measurement.comparison


def decide(
    endpoint: Endpoint,
    comparison: Comparison,
    *,
    p_adjusted: float | None = None,
    caps: Sequence[str] = (),
) -> Decision:
    """The verdict of valid numbers.

    p_adjusted: Holm's p of a primary endpoint, None outside a family. caps: why equivalence may not be claimed
    whatever the interval says.
    """
    alpha = comparison.alpha
    within = wording.margin(endpoint)
    estimate = wording.effect(endpoint, comparison.estimate)
    p_value = comparison.p_difference if p_adjusted is None else p_adjusted
    different = p_value < alpha
    inside = comparison.p_equivalence < alpha
    reasons = [f"equivalence may not be claimed: {cap}" for cap in caps]
    if inside and not caps:
        resolved = f" (a difference of {estimate} is resolved)" if different else ""
        return Decision(Verdict.EQUIVALENT, f"within {within}{resolved}")
    if different:
        word = wording.better(endpoint, comparison)
        return Decision(Verdict.DIFFERENT, f"{word}, {estimate}", tuple(reasons))
    if endpoint.non_inferiority and not caps and _not_worse(endpoint, comparison):
        return Decision(Verdict.NON_INFERIOR, f"within {within[1:]}")
    only_uncorrected = comparison.p_difference < alpha
    if only_uncorrected:
        reasons.append(f"the difference does not survive Holm's correction: {p_value:.2g}")
    if caps:
        return Decision(Verdict.INCONCLUSIVE, "more runs alone do not settle it", tuple(reasons))
    beyond = f"the TOST interval reaches beyond {within}"
    if endpoint.non_inferiority:
        beyond = f"the one-sided interval reaches beyond {within[1:]} on the worse side"
    same = "the paired one" if comparison.paired else "Welch's"
    reasons.append(beyond if only_uncorrected else f"{beyond} and {same} includes no difference")
    needed = _needed(endpoint, comparison, reasons)
    return Decision(Verdict.INCONCLUSIVE, f"needs n = {needed}", tuple(reasons), needed)


def judge(experiment: Experiment) -> tuple[EndpointResult, ...]:
    """Verdicts in the order candidates x endpoints; Holm's family is every primary of every candidate.

    A primary that is dropped or demoted when runs have records stays in the family, without a rejection where it is gone.
    """
    plan = experiment.plan
    measured = [m for name in plan.candidates for m in measure(Pair(experiment, name))]
    primaries = [m for m in measured if m.endpoint.name in plan.primaries_ever]
    # An endpoint without a usable p-value stays in the family it was declared in, and takes no rejection from it.
    family = [
        1.0 if m.p_difference is None or any(c.refuses for c in m.checks) else m.p_difference
        for m in primaries
    ]
    dropped = set(plan.primaries_ever) - {endpoint.name for endpoint in plan.endpoints}
    family += [1.0] * (len(dropped) * len(plan.candidates))
    adjusted = [float(p) for p in multipletests(family, method="holm")[1]]
    holm = {(m.candidate, m.endpoint.name): p for m, p in zip(primaries, adjusted)}
    return tuple(_conclude(m, holm.get((m.candidate, m.endpoint.name))) for m in measured)


def _conclude(measured: Measurement, p_holm: float | None) -> EndpointResult:
    endpoint, comparison = measured.endpoint, measured.comparison
    refusing = [check for check in measured.checks if check.refuses]
    caps = [f"{check.name}: {check.found}" for check in measured.checks if check.caps]
    omissions: tuple[Omission, ...] = ()
    said: tuple[str, ...] = ()
    if refusing:
        more = f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
        decision = Decision(
            Verdict.INVALID,
            f"{refusing[0].name}{more}",
            tuple(f"{check.name}: {check.found}" for check in refusing),
        )
    elif measured.pending:
        decision = _wait_for(measured.pending)
    elif measured.race is not None:
        decision = _decide_race(measured, p_holm)
        said = race_cautions(measured)
    elif comparison is not None:
        decision = decide(endpoint, comparison, p_adjusted=p_holm, caps=caps)
        whole = decide(endpoint, comparison, caps=caps).verdict
        omissions = leave_one_out(measured, lambda c: decide(endpoint, c, caps=caps).verdict)
        said = cautions(measured, omissions, whole)
    elif measured.fewest_runs < LEAST_RUNS and not measured.missing:
        decision = Decision(
            Verdict.INCONCLUSIVE,
            f"needs n = {LEAST_RUNS} or more a side",
            (measured.no_inference,),
        )
    else:
        decision = Decision(Verdict.INVALID, "no usable number", (measured.no_inference,))
    may, may_not = wording.sentences(
        decision.verdict,
        endpoint,
        measured.candidate,
        measured.baseline,
        measured.race or comparison,
        _outlook(endpoint, decision),
        one_start=any(c.name == "same initial checkpoint" and c.passed for c in measured.checks),
        p_holm=p_holm,
    )
    if measured.finishers and decision.verdict != Verdict.INVALID:
        may = f"Among the runs that finished ({measured.finishers}): {may}"
        may_not = f"The same without the runs that were lost. {may_not}"
    if endpoint.condition and decision.verdict != Verdict.INVALID:
        may = f"{may} This holds where {endpoint.condition.strip().rstrip('.')}."
    return EndpointResult(measured, p_holm, decision, omissions, said, may, may_not)


def _wait_for(pending: Sequence[str]) -> Decision:
    """A verdict before the last run has ended would be a look that nobody counted."""
    verb = "has" if len(pending) == 1 else "have"
    return Decision(
        Verdict.INCONCLUSIVE,
        f"{len(pending)} planned run{'s' * (len(pending) > 1)} {verb} not ended",
        (f"not ended: {'; '.join(pending)}",),
    )


def _decide_race(measured: Measurement, p_holm: float | None) -> Decision:
    """Where runs ended before the threshold: the log-rank test sees a difference, nothing sees equivalence.

    No needed n: it would rest on a difference that nobody knows.
    """
    race = measured.race
    p_value = race.p_logrank if p_holm is None else p_holm
    censored = f"{race.text}; a run that did not reach the threshold has no value to average"
    if p_value < race.alpha:
        side = "better" if race.candidate_first else "worse"
        return Decision(Verdict.DIFFERENT, f"{side}, {race.text}", (censored,))
    least = (
        f"; no difference can be seen below n = {race.least_runs} a side" if race.least_runs else ""
    )
    return Decision(
        Verdict.INCONCLUSIVE,
        "runs did not reach the threshold",
        (censored, f"log-rank {wording.probability(race.p_logrank)}{least}"),
    )


def _outlook(endpoint: Endpoint, decision: Decision) -> str:
    """Half a sentence: what stands in the way, or how many runs would settle it."""
    if decision.needed is not None:
        shown = "non-inferiority" if endpoint.non_inferiority else "it"
        return f"if the arms are truly equal, showing {shown} takes n = {decision.needed}"
    if decision.verdict == Verdict.INVALID:
        return f"the comparison is invalid ({decision.detail})"
    return "; ".join(decision.reasons)


def _not_worse(endpoint: Endpoint, comparison: Comparison) -> bool:
    """One-sided: the interval stays on the good side of the margin."""
    if endpoint.direction == "higher":
        return comparison.tost_low > comparison.bound_low
    return comparison.tost_high < comparison.bound_high


def _needed(endpoint: Endpoint, comparison: Comparison, reasons: list[str]) -> NeededRuns:
    """Runs a side for the declared claim at a true difference of 0; more than there are, since these did not settle it."""
    needed = needed_runs(
        *comparison.tested_spreads,
        comparison.df,
        comparison.tested_margin,
        alpha=comparison.alpha,
        one_sided=endpoint.non_inferiority,
    )
    have = min(comparison.n, comparison.n_baseline)
    if needed.estimate is not None and needed.estimate <= have:
        reasons.append("the spread is small enough; it is the estimate that lies near the margin")
    return needed.at_least(have + 1)
