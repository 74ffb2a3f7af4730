"""Numbers and sentences as a person reads them: the one place that words an effect, a margin, a claim.

Every verdict comes with the sentence that may be written in a paper and the one that may not.
"""

from __future__ import annotations

import math
import re

from analysis.endpoint import Endpoint
from analysis.inference import Comparison
from analysis.thresholds import Race

MINUS = "\u2212"


def number(value: float, digits: int = 4) -> str:
    """Significant digits without trailing noise: 0.8125, 119.4, 3.21e-05."""
    if not math.isfinite(value):
        return "\u2013"
    return tidy(f"{value:.{digits}g}").replace("-", MINUS)


def tidy(text: str) -> str:
    """Exponents without a leading zero: 1e-05 is 1e-5."""
    return re.sub(r"e([-+])0(\d)", r"e\1\2", text)


def effect(endpoint: Endpoint, value: float) -> str:
    """A difference with its sign, or a ratio as a signed percentage."""
    if endpoint.scale == "ratio":
        return f"{value - 1:+.1%}".replace("-", MINUS).replace("%", "\u202f%")
    decimals = max(0, 1 - math.floor(math.log10(endpoint.margin)))
    text = f"{value:+.{decimals}f}" if decimals <= 5 else f"{value:+.3g}"
    return text.replace("-", MINUS)


def interval(endpoint: Endpoint, low: float, high: float) -> str:
    return f"[{effect(endpoint, low)}, {effect(endpoint, high)}]"


def margin(endpoint: Endpoint) -> str:
    """The margin as declared: ±0.03 share, or ±10 % (as a ratio)."""
    if endpoint.scale == "ratio":
        return f"±{endpoint.margin * 100:g}\u202f%"
    return f"±{endpoint.margin:g} {endpoint.unit}".rstrip()


def probability(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def better(endpoint: Endpoint, comparison: Comparison) -> str:
    """ "better" or "worse": the candidate against the baseline, by the declared direction."""
    neutral = 1.0 if endpoint.scale == "ratio" else 0.0
    return (
        "better" if (comparison.estimate > neutral) == (endpoint.direction == "higher") else "worse"
    )


def evidence(
    endpoint: Endpoint, comparison: Comparison, verdict: str, p_holm: float | None = None
) -> str:
    """The numbers a sentence must carry: estimate, interval, the test that the verdict rests on, and n."""
    low, high, level = comparison.tost_low, comparison.tost_high, 2 * comparison.level - 1
    if verdict == "EQUIVALENT":
        test = f"{'paired ' * comparison.paired}TOST {probability(comparison.p_equivalence)}"
    elif verdict == "NON-INFERIOR":
        test = f"one-sided {comparison.test} {probability(comparison.p_non_inferiority)}"
    else:
        low, high, level = comparison.ci_low, comparison.ci_high, comparison.level
        test = f"{comparison.test} {corrected(comparison.p_difference, p_holm)}"
    kind = "relative difference" if endpoint.scale == "ratio" else "difference"
    unit = "" if endpoint.scale == "ratio" else f" {endpoint.unit}"
    return (
        f"{kind} {effect(endpoint, comparison.estimate)}{unit}, {level * 100:g}\u202f% CI "
        f"{interval(endpoint, low, high)}, {test}, n = {runs(comparison)}"
    )


def corrected(p: float, p_holm: float | None) -> str:
    """A p-value, with Holm's beside it where the family made it another one."""
    holm = (
        "" if p_holm is None or p_holm == p else f", after Holm's correction {probability(p_holm)}"
    )
    return f"{probability(p)}{holm}"


def runs(comparison: Comparison) -> str:
    """ "5 runs an arm", "4 and 5 runs", or "5 pairs"."""
    if comparison.paired:
        return f"{comparison.n} pairs"
    if comparison.n == comparison.n_baseline:
        return f"{comparison.n} runs an arm"
    return f"{comparison.n} and {comparison.n_baseline} runs"


def sentences(
    verdict: str,
    endpoint: Endpoint,
    candidate: str,
    baseline: str,
    comparison: Comparison | Race | None,
    outlook: str,
    one_start: bool = True,
    p_holm: float | None = None,
) -> tuple[str, str]:
    """(may be written, may not be written). ``outlook``: why INVALID, or what would settle INCONCLUSIVE.

    one_start: whether it was verified that all runs began from one checkpoint. p_holm: of a primary endpoint.
    """
    pair, name = f"{candidate} and {baseline}", endpoint.name
    if isinstance(comparison, Race) and verdict != "INVALID":
        return _race_sentences(verdict, endpoint, candidate, baseline, comparison, p_holm)
    if verdict == "INVALID" or comparison is None:
        return (
            f"The runs support no statement about {name}: {outlook}.",
            f"Any comparison of {pair} in {name}, with or without numbers.",
        )
    numbers = evidence(endpoint, comparison, verdict, p_holm)
    same_start = (
        "trained from one initial checkpoint"
        if one_start
        else "trained from initial checkpoints that were not compared"
    )
    if verdict == "EQUIVALENT":
        return (
            f"{pair}, {same_start}, are equivalent in {name} within {margin(endpoint)} "
            f"({numbers}).",
            f"{pair} are identical, or equivalent within less than {margin(endpoint)}, or from other initial weights.",
        )
    if verdict == "NON-INFERIOR":
        return (
            f"{candidate}, {same_start}, is not worse than {baseline} in {name} by more than {margin(endpoint)[1:]} "
            f"({numbers}).",
            f"{candidate} is better than {baseline}, or equivalent to it.",
        )
    if verdict == "DIFFERENT":
        return (
            f"{candidate} is {better(endpoint, comparison)} than {baseline} in {name}, {same_start} "
            f"({numbers}).",
            f"The gap is exactly {effect(endpoint, comparison.estimate)}, or holds on other tasks, scales or initial "
            "weights.",
        )
    return (
        f"Whether {pair} differ in {name} is open ({numbers}); {outlook}.",
        f"{pair} are comparable, on par, or not significantly different in {name}.",
    )


def _race_sentences(
    verdict: str,
    endpoint: Endpoint,
    candidate: str,
    baseline: str,
    found: Race,
    p_holm: float | None,
) -> tuple[str, str]:
    """Where some runs never reached the threshold there is no average to write about."""
    faster = "earlier" if found.candidate_first else "later"
    counts = f"{found.text}; log-rank {corrected(found.p_logrank, p_holm)}"
    said = (
        f"{candidate} reaches {endpoint.threshold:g} of {endpoint.field} {faster} than {baseline} ({counts})."
        if verdict == "DIFFERENT"
        else f"Whether {candidate} or {baseline} reaches {endpoint.threshold:g} of {endpoint.field} earlier is open ({counts})."
    )
    return (
        said,
        f"A mean or a ratio of {endpoint.name}: runs that never reached the threshold have no value.",
    )
