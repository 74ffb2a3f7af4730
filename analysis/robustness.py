"""What a reader must know beside a verdict: the run that decides alone, few runs, low power, a badly calibrated test.

omissions = leave_one_out(measured, verdict_of)
cautions(measured, omissions, verdict)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from analysis import calibration
from analysis.inference import Comparison, NoInference, Verdict, compare_samples
from analysis.measurement import Measurement
from analysis.sample_size import TARGET_POWER, tost_power
from analysis.wording import number, probability

FEW_RUNS = 5
SPREAD_RATIO = 4.0
"""Fewer runs an arm, or spreads further apart, earn a caution beside the verdict."""


@dataclass(frozen=True)
class Omission:
    """The comparison without one run (a pair where paired); None where too few are left for one."""

    arm: str
    seed: int
    comparison: Comparison | None
    verdict: Verdict | None


def leave_one_out(
    measured: Measurement, verdict_of: Callable[[Comparison], Verdict]
) -> tuple[Omission, ...]:
    """The comparison without each run in turn."""
    return tuple(_omissions(measured, verdict_of))


def _omissions(
    measured: Measurement, verdict_of: Callable[[Comparison], Verdict]
) -> Iterator[Omission]:
    whole, endpoint = measured.comparison, measured.endpoint
    for position, (arm, seed) in _units(measured):
        samples = [list(sample) for sample in measured.samples]
        for sample in samples if whole.paired else samples[position[0] : position[0] + 1]:
            del sample[position[1]]
        try:
            rest = compare_samples(
                *samples,
                margin=endpoint.margin,
                scale=endpoint.scale,
                alpha=whole.alpha,
                paired=whole.paired,
            )
        except NoInference:
            yield Omission(arm, seed, None, None)
            continue
        yield Omission(arm, seed, rest, verdict_of(rest))


def _units(measured: Measurement) -> Iterator[tuple[tuple[int, int], tuple[str, int]]]:
    """((sample, position), (arm, seed)) of every run that enters the comparison; a pair goes by its candidate."""
    for side, name in enumerate((measured.candidate, measured.baseline)):
        if measured.comparison.paired and side == 1:
            return
        for position, seed in enumerate(measured.used_seeds[side]):
            yield (side, position), (name, seed)


def cautions(
    measured: Measurement, omissions: Sequence[Omission], verdict: Verdict
) -> tuple[str, ...]:
    """In the order of what could overturn the verdict. ``verdict``: the one without Holm's correction."""
    comparison = measured.comparison
    have = min(comparison.n, comparison.n_baseline)
    found = _flags(measured)
    found += [measured.pairing_note] if measured.pairing_note else []
    if comparison.paired and comparison.correlation < 0:
        found.append(
            f"the pairs' correlation is {number(comparison.correlation, 2)}: pairing cost power here"
        )
    found += calibration.warnings(comparison, measured.samples, verdict)
    if have < FEW_RUNS:
        found.append(
            f"n = {have}: an interval from so few runs leans on normality, which cannot be checked"
        )
    if comparison.spread_ratio > SPREAD_RATIO:
        found.append(
            f"the arms' spreads differ {comparison.spread_ratio:.1f}-fold: a finding of its own"
        )
    p_exact = comparison.p_permutation
    if p_exact is not None and (p_exact < comparison.alpha) != (
        comparison.p_difference < comparison.alpha
    ):
        found.append(
            f"the exact permutation test does not agree: {probability(p_exact)} against "
            f"{probability(comparison.p_difference)}"
        )
    power = tost_power(
        have, *comparison.tested_spreads, comparison.tested_margin, alpha=comparison.alpha
    )
    if power < TARGET_POWER:
        found.append(f"power to show equivalence with these spreads and n = {have}: {power:.0%}")
    if measured.worst_case is not None and measured.worst_case.disagrees(comparison):
        found.append(measured.worst_case.text)
    found += [
        f"without {o.arm} seed {o.seed} the verdict would be {o.verdict}"
        for o in omissions
        if o.verdict is not None and o.verdict != verdict
    ]
    return tuple(found)


def race_cautions(measured: Measurement) -> tuple[str, ...]:
    """The same for a time to a threshold that some runs never reached."""
    return (*_flags(measured), *measured.race.cautions)


def _flags(measured: Measurement) -> list[str]:
    """The checks that were failed and only shown."""
    failed = [c for c in measured.checks if c.passed is False and c.effect == "flag"]
    return [f"{check.name}: {check.found}" for check in failed]
