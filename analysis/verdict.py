"""The verdict of an endpoint: validity first, then intervals, and only these five words.

EQUIVALENT within m | NON-INFERIOR within m | DIFFERENT | INCONCLUSIVE | INVALID. Never from p > 0.05, never from
overlapping bars. DIFFERENT asks Welch's interval (Holm over the declared primaries), EQUIVALENT asks TOST's.

    for result in judge(load_experiment("runs/moe_vl/tiny")):
        print(result.decision.headline, result.may_write)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from statsmodels.stats.multitest import multipletests

from analysis import wording
from analysis.checks import Pair
from analysis.inference import LEAST_RUNS, Comparison, NoInference, compare_samples
from analysis.load import Experiment
from analysis.measurement import Measurement, measure
from analysis.plan import Endpoint
from analysis.power import TARGET_POWER, NeededRuns, needed_runs, tost_power

FEW_RUNS = 5
SPREAD_RATIO = 4.0
"""Fewer runs an arm, or spreads further apart, earn a caution beside the verdict."""


class Verdict(StrEnum):
    EQUIVALENT = "EQUIVALENT"
    NON_INFERIOR = "NON-INFERIOR"
    DIFFERENT = "DIFFERENT"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"


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
    """What may be said about one endpoint of one candidate against the baseline."""

    measurement: Measurement
    p_holm: float | None
    decision: Decision
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
    alpha: float = 0.05,
) -> Decision:
    """The verdict of valid numbers.

    p_adjusted: Holm's p of a primary endpoint, None outside a family. caps: why equivalence may not be claimed
    whatever the interval says.
    """
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
    reasons.append(beyond if only_uncorrected else f"{beyond} and Welch's includes no difference")
    needed = _needed(comparison, alpha, reasons)
    return Decision(Verdict.INCONCLUSIVE, f"needs n = {needed}", tuple(reasons), needed)


def judge(experiment: Experiment) -> tuple[EndpointResult, ...]:
    """Verdicts in the order candidates x endpoints; Holm's family is every primary of every candidate."""
    plan = experiment.plan
    measured = [m for name in plan.candidates for m in measure(Pair(experiment, name))]
    primaries = [m for m in measured if m.endpoint.primary]
    # An endpoint without a usable p-value stays in the family it was declared in, and takes no rejection from it.
    family = [
        m.comparison.p_difference if m.comparison and not any(c.refuses for c in m.checks) else 1.0
        for m in primaries
    ]
    adjusted = [float(p) for p in multipletests(family, method="holm")[1]]
    holm = {(m.candidate, m.endpoint.name): p for m, p in zip(primaries, adjusted)}
    return tuple(
        _conclude(m, holm.get((m.candidate, m.endpoint.name)), plan.alpha_per_look)
        for m in measured
    )


def _conclude(measured: Measurement, p_holm: float | None, alpha: float) -> EndpointResult:
    endpoint, comparison = measured.endpoint, measured.comparison
    refusing = [check for check in measured.checks if check.refuses]
    caps = [f"{check.name}: {check.found}" for check in measured.checks if check.caps]
    cautions: tuple[str, ...] = ()
    if refusing:
        more = f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
        decision = Decision(
            Verdict.INVALID,
            f"{refusing[0].name}{more}",
            tuple(f"{check.name}: {check.found}" for check in refusing),
        )
    elif comparison is not None:
        decision = decide(endpoint, comparison, p_adjusted=p_holm, caps=caps, alpha=alpha)
        cautions = _cautions(measured, decision, caps, alpha)
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
        comparison,
        _outlook(decision),
    )
    return EndpointResult(measured, p_holm, decision, cautions, may, may_not)


def _outlook(decision: Decision) -> str:
    """Half a sentence: what stands in the way, or how many runs would settle it."""
    if decision.needed is not None:
        return f"if the arms are truly equal, showing it takes n = {decision.needed}"
    if decision.verdict == Verdict.INVALID:
        return f"the comparison is invalid ({decision.detail})"
    return "; ".join(decision.reasons)


def _not_worse(endpoint: Endpoint, comparison: Comparison) -> bool:
    """One-sided: the interval stays on the good side of the margin."""
    if endpoint.direction == "higher":
        return comparison.tost_low > comparison.bound_low
    return comparison.tost_high < comparison.bound_high


def _needed(comparison: Comparison, alpha: float, reasons: list[str]) -> NeededRuns:
    """Runs a side for TOST at a true difference of 0; more than there are, since these did not settle it."""
    needed = needed_runs(
        comparison.spread,
        comparison.spread_baseline,
        comparison.df,
        comparison.tested_margin,
        alpha=alpha,
    )
    have = min(comparison.n, comparison.n_baseline)
    if needed.estimate is not None and needed.estimate <= have:
        reasons.append("the spread is small enough; it is the estimate that lies near the margin")
    return needed.at_least(have + 1)


def _cautions(
    measured: Measurement, decision: Decision, caps: Sequence[str], alpha: float
) -> tuple[str, ...]:
    """What a reader must know beside the verdict: few runs, unequal spreads, low power, one run that decides."""
    comparison = measured.comparison
    have = min(comparison.n, comparison.n_baseline)
    cautions = [
        f"{c.name}: {c.found}" for c in measured.checks if c.passed is False and c.effect == "flag"
    ]
    if have < FEW_RUNS:
        cautions.append(
            f"n = {have}: an interval from so few runs leans on normality, which cannot be checked"
        )
    if comparison.spread_ratio > SPREAD_RATIO:
        cautions.append(
            f"the arms' spreads differ {comparison.spread_ratio:.1f}-fold: a finding of its own"
        )
    power = tost_power(
        have, comparison.spread, comparison.spread_baseline, comparison.tested_margin, alpha=alpha
    )
    if power < TARGET_POWER:
        cautions.append(f"power to show equivalence with these spreads and n = {have}: {power:.0%}")
    cautions += _leave_one_out(measured, decision, caps, alpha)
    return tuple(cautions)


def _leave_one_out(
    measured: Measurement, decision: Decision, caps: Sequence[str], alpha: float
) -> list[str]:
    """Runs without which the verdict would be another one (unadjusted p)."""
    endpoint = measured.endpoint
    whole = decide(endpoint, measured.comparison, caps=caps, alpha=alpha).verdict
    found = []
    for arm, by_seed in measured.values.items():
        for seed in by_seed:
            samples = {name: dict(values) for name, values in measured.values.items()}
            del samples[arm][seed]
            try:
                rest = compare_samples(
                    list(samples[measured.candidate].values()),
                    list(samples[measured.baseline].values()),
                    margin=endpoint.margin,
                    scale=endpoint.scale,
                    alpha=alpha,
                )
            except NoInference:
                continue
            verdict = decide(endpoint, rest, caps=caps, alpha=alpha).verdict
            if verdict != whole:
                found.append(f"without {arm} seed {seed} the verdict would be {verdict}")
    return found
