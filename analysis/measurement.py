"""From runs to one number a run and one comparison an endpoint, with every check that bears on it. No verdict yet.

measurements = measure(Pair(experiment, "molt"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from analysis.checks import Check, Pair
from analysis.endpoint import Endpoint
from analysis.inference import Comparison, NoInference, compare_samples
from analysis.lost import WorstCase, worst_case
from analysis.pairing import pair_up
from analysis.sensitivity import check_endpoint
from analysis.summaries import SummaryError, crossing, summarise
from analysis.thresholds import Race, race
from analysis.validity import check_runs


@dataclass(frozen=True)
class Measurement:
    """An endpoint as measured. ``values``: arm -> seed -> the run's number, candidate first.

    missing: finished runs that gave no number. comparison is None where no interval may be made, and ``no_inference``
    says why. used_seeds: per arm, the seeds that enter the comparison, pair by pair where it is paired. race stands in
    place of a comparison where a run ended before the endpoint's threshold; its value is then where it ended. planned:
    per arm, the runs of the plan, finished or lost.
    """

    endpoint: Endpoint
    candidate: str
    baseline: str
    values: Mapping[str, Mapping[int, float]]
    missing: tuple[str, ...]
    comparison: Comparison | None
    no_inference: str
    checks: tuple[Check, ...]
    used_seeds: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    pairing_note: str = ""
    race: Race | None = None
    worst_case: WorstCase | None = None
    planned: Mapping[str, int] = field(default_factory=dict)
    pending: tuple[str, ...] = ()

    @property
    def fewest_runs(self) -> int:
        return min(len(by_seed) for by_seed in self.values.values())

    @property
    def finishers(self) -> str:
        """ "molt 4 of 5, megatron 5 of 5" where runs were lost, "" where all finished."""
        counts = {
            name: (len(by), self.planned.get(name, len(by))) for name, by in self.values.items()
        }
        if all(finished == planned for finished, planned in counts.values()):
            return ""
        return ", ".join(f"{name} {f} of {p}" for name, (f, p) in counts.items())

    @property
    def samples(self) -> tuple[list[float], list[float]]:
        """The numbers that enter the comparison: the candidate's, the baseline's."""
        names = (self.candidate, self.baseline)
        return tuple([self.values[n][s] for s in seeds] for n, seeds in zip(names, self.used_seeds))

    @property
    def p_difference(self) -> float | None:
        """What Holm's correction takes: Welch's p, the paired one, or the log-rank test's; None without a test."""
        if self.race is not None:
            return self.race.p_logrank
        return self.comparison and self.comparison.p_difference


def measure(pair: Pair) -> tuple[Measurement, ...]:
    """Every endpoint of the plan for one candidate against the baseline."""
    run_checks = check_runs(pair)
    return tuple(_measure_endpoint(pair, endpoint, run_checks) for endpoint in pair.plan.endpoints)


def _measure_endpoint(pair: Pair, endpoint: Endpoint, run_checks: tuple[Check, ...]) -> Measurement:
    values: dict[str, dict[int, float]] = {name: {} for name in pair.arms}
    missing = []
    for name, runs in pair.arms.items():
        for run in runs:
            try:
                values[name][run.seed] = summarise(endpoint, run, pair.plan.exclusion)
            except SummaryError as error:
                missing.append(str(error))
    checks = tuple(check for check in run_checks if endpoint.name in check.endpoints)
    comparison, no_inference, found_race = None, "; ".join(missing), None
    paired, used, note = pair_up(pair, endpoint, values)
    ours, theirs = ([values[n][s] for s in seeds] for n, seeds in zip(pair.names, used))
    if not missing:
        checks += check_endpoint(pair, endpoint, {n: list(v.values()) for n, v in values.items()})
        try:
            found_race = _race(pair, endpoint)
            if found_race is None:
                comparison = compare_samples(
                    ours,
                    theirs,
                    margin=endpoint.margin,
                    scale=endpoint.scale,
                    alpha=pair.plan.alpha_per_look,
                    paired=paired,
                    permutation=True,
                    direction=endpoint.direction,
                )
        except NoInference as error:
            no_inference = str(error)
    lost = [len(pair.experiment.of(n)) - len(pair.arms[n]) for n in pair.names]
    return Measurement(
        endpoint=endpoint,
        candidate=pair.candidate,
        baseline=pair.plan.baseline,
        values=values,
        missing=tuple(missing),
        comparison=comparison,
        no_inference=no_inference,
        checks=checks,
        used_seeds=used,
        pairing_note=note,
        race=found_race,
        planned={name: len(pair.experiment.of(name)) for name in pair.names},
        pending=tuple(
            f"{run.folder} ({run.reason})"
            for name in pair.names
            for run in pair.experiment.pending(name)
        ),
        worst_case=None
        if comparison is None
        else worst_case(*(list(values[n].values()) for n in pair.names), *lost, endpoint.direction),
    )


def _race(pair: Pair, endpoint: Endpoint) -> Race | None:
    """The log-rank test, where a run of a time to a threshold never reached it. Raises NoInference where none did."""
    if endpoint.threshold is None:
        return None
    arms = [[crossing(endpoint, run) for run in pair.arms[name]] for name in pair.names]
    if all(run.reached for runs in arms for run in runs):
        return None
    if min(map(len, arms)) < 3:
        raise NoInference("fewer than 3 runs an arm, and not all of them reached the threshold")
    try:
        return race(*arms, alpha=pair.plan.alpha_per_look)
    except ValueError as error:
        raise NoInference(str(error)) from error
