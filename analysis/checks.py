"""What a check is: one question about the runs of two arms, answered before any number of an endpoint is looked at.

Each says what failing does: ``invalid`` (the comparison says nothing, whatever its numbers), ``no_equivalence`` (a
difference may still be claimed, its absence may not) or ``flag`` (shown). A check that could not be made has
``passed=None``: unverified, which caps a required one at ``no_equivalence``.

    validity.py      is each run a training run?
    matching.py      do the arms differ in the arm and in nothing else?
    sensitivity.py   could this endpoint have shown a difference?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from analysis.load import Experiment, RunRecord
from analysis.plan import Plan
from analysis.wording import tidy

Effect = Literal["invalid", "no_equivalence", "flag"]


@dataclass(frozen=True)
class Check:
    """One check. ``values``: what was seen, per arm; ``found``: what is wrong, naming the run, "" where it passed."""

    name: str
    passed: bool | None
    values: Mapping[str, str]
    bound: str
    why: str
    found: str
    effect: Effect
    endpoints: tuple[str, ...]

    @property
    def refuses(self) -> bool:
        """True where the endpoints it guards are INVALID."""
        return self.passed is False and self.effect == "invalid"

    @property
    def caps(self) -> bool:
        """True where equivalence may not be claimed: insensitive, or a required check unverified."""
        if self.passed is None:
            return self.effect != "flag"
        return not self.passed and self.effect == "no_equivalence"


@dataclass(frozen=True)
class Pair:
    """A candidate and the baseline; ``arms`` holds their finished runs, in this order."""

    experiment: Experiment
    candidate: str

    @property
    def plan(self) -> Plan:
        return self.experiment.plan

    @property
    def names(self) -> tuple[str, str]:
        return (self.candidate, self.plan.baseline)

    @property
    def arms(self) -> dict[str, tuple[RunRecord, ...]]:
        return {name: self.experiment.finished(name) for name in self.names}

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        return tuple(run for runs in self.arms.values() for run in runs)


class Finding(NamedTuple):
    """What a check saw: passed (None: could not be made), a text per arm, and what is wrong."""

    passed: bool | None
    values: Mapping[str, str]
    found: str


class Problem(Exception):
    """Raised while judging a run that fails; the message completes "<run folder>: ..."."""


@dataclass(frozen=True)
class PairCheck:
    """A check of a pair's runs. ``bound`` may name fields of the plan's bounds; ``kinds`` limits what it guards."""

    name: str
    look: Callable[[Pair], Finding]
    bound: str
    why: str
    effect: Effect
    kinds: tuple[str, ...]

    def __call__(self, pair: Pair) -> Check:
        plan = pair.plan
        finding = self.look(pair)
        return Check(
            name=self.name,
            passed=None if finding.passed is None else bool(finding.passed),
            values={arm: tidy(text) for arm, text in finding.values.items()},
            bound=tidy(
                self.bound.format(**plan.validity.model_dump(), **plan.lost_run_rule.model_dump())
            ),
            why=self.why,
            found=tidy(finding.found),
            effect=self.effect,
            endpoints=tuple(
                e.name for e in plan.endpoints if not self.kinds or e.kind in self.kinds
            ),
        )


def pair_check(
    name: str, bound: str, why: str, effect: Effect = "invalid", kinds: tuple[str, ...] = ()
) -> Callable[[Callable[[Pair], Finding]], PairCheck]:
    """Make a PairCheck of a function; text and code of a check stay together."""
    return lambda look: PairCheck(name, look, bound, why, effect, kinds)


def each_run(
    pair: Pair, judge: Callable[[RunRecord], Any], show: Callable[[list[Any]], str]
) -> Finding:
    """Judge every finished run; ``judge`` returns the value to show and raises Problem where the run fails."""
    if not pair.runs:
        return Finding(None, {}, "no finished run")
    problems, values = [], {}
    for name, runs in pair.arms.items():
        seen = []
        for run in runs:
            try:
                seen.append(judge(run))
            except Problem as problem:
                problems.append(f"{run.folder}: {problem}")
        values[name] = show(seen) if seen else "none passed"
    return Finding(not problems, values, "; ".join(problems))
