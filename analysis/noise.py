"""The noise floor: what the endpoints show where nothing is learned, and how far two runs part that share all they can.

The learning-rate-zero control and the same-seed repeats are optional arms of an experiment. They enter no comparison; a
difference between arms is read beside them. Under lockstep two arms of one seed see the same prompts, request seeds and
order, so the first step at which their records part says how long the trainers stayed together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.endpoint import Endpoint
from analysis.load import FINISHED, Experiment, RunRecord
from analysis.summaries import SummaryError, crossing, summarise

SHARED = ("tokens_generated", "reward_mean", "trained_fingerprint")
"""What two runs of one seed share step by step until their policies sample differently."""


@dataclass(frozen=True)
class NoiseFloor:
    """Of one endpoint. control: values with learning rate zero; repeats: arm -> values of one seed, the replicate first."""

    control: tuple[float, ...]
    repeats: Mapping[str, tuple[float, ...]]

    @property
    def control_mean(self) -> float | None:
        return float(np.mean(self.control)) if self.control else None

    @property
    def same_seed_sd(self) -> float | None:
        """Standard deviation of runs with one system and one seed, pooled over the arms; None without a repeat."""
        groups = [values for values in self.repeats.values() if len(values) > 1]
        if not groups:
            return None
        squares = sum((len(v) - 1) * float(np.var(v, ddof=1)) for v in groups)
        return math.sqrt(squares / sum(len(v) - 1 for v in groups))


@dataclass(frozen=True)
class Parting:
    """When two runs of one seed parted: the first step with a difference and the field that showed it; None: never."""

    first: str
    second: str
    seed: int
    step: int | None
    field: str | None


def noise_floor(experiment: Experiment, endpoint: Endpoint) -> NoiseFloor:
    """The floor of an endpoint from the finished runs; empty where the plan has none."""
    repeats: dict[str, tuple[float, ...]] = {}
    for arm in experiment.plan.arms:
        again = [r for r in experiment.repeats if r.system == arm.name and r.state == FINISHED]
        seeds = {run.seed for run in again}
        first = [run for run in experiment.finished(arm.name) if run.seed in seeds]
        if again and first:
            repeats[arm.name] = _values(experiment, endpoint, [*first, *again])
    control = [run for run in experiment.controls if run.state == FINISHED]
    return NoiseFloor(_values(experiment, endpoint, control), repeats)


def _values(
    experiment: Experiment, endpoint: Endpoint, runs: Sequence[RunRecord]
) -> tuple[float, ...]:
    """One number a run; a run without its number has none to show here, its replicate is judged elsewhere."""
    found = []
    for run in runs:
        try:
            if endpoint.threshold is None or crossing(endpoint, run).reached:
                found.append(summarise(endpoint, run, experiment.plan.exclusion))
        except SummaryError:
            continue
    return tuple(found)


def partings(experiment: Experiment) -> tuple[Parting, ...]:
    """Of every candidate and every repeat, against its partner of the same seed; () where the schedule is free."""
    found = []
    baseline = {run.seed: run for run in experiment.finished(experiment.plan.baseline)}
    for name in experiment.plan.candidates:
        found += [
            _parting(run, baseline[run.seed], name, experiment.plan.baseline)
            for run in experiment.finished(name)
            if run.seed in baseline and _lockstep(run) and _lockstep(baseline[run.seed])
        ]
    for run in experiment.repeats:
        partner = [r for r in experiment.finished(run.system) if r.seed == run.seed]
        if run.state == FINISHED and partner and _lockstep(run):
            found.append(_parting(run, partner[0], run.system, f"{run.system} again"))
    return tuple(found)


def _lockstep(run: RunRecord) -> bool:
    return run.config.get("loop", {}).get("schedule") == "lockstep"


def _parting(run: RunRecord, partner: RunRecord, first: str, second: str) -> Parting:
    steps = run.training.index.intersection(partner.training.index)
    earliest: tuple[int, str] | None = None
    for field in SHARED:
        if field not in run.training or field not in partner.training:
            continue
        ours, theirs = run.training.loc[steps, field], partner.training.loc[steps, field]
        apart = steps[((ours != theirs) & ~(ours.isna() & theirs.isna())).to_numpy()]
        if len(apart) and (earliest is None or apart[0] < earliest[0]):
            earliest = (int(apart[0]), field)
    return Parting(first, second, run.seed, *(earliest or (None, None)))
