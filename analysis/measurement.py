"""From runs to one number a run and one comparison an endpoint, with every check that bears on it. No verdict yet.

measurements = measure(Pair(experiment, "molt"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analysis.checks import Check, Pair
from analysis.inference import Comparison, NoInference, compare_samples
from analysis.plan import Endpoint
from analysis.sensitivity import check_endpoint
from analysis.summaries import SummaryError, summarise
from analysis.validity import check_runs


@dataclass(frozen=True)
class Measurement:
    """An endpoint as measured. ``values``: arm -> seed -> the run's number, candidate first.

    missing: finished runs that gave no number. comparison is None where no interval may be made, and ``no_inference``
    says why.
    """

    endpoint: Endpoint
    candidate: str
    baseline: str
    values: Mapping[str, Mapping[int, float]]
    missing: tuple[str, ...]
    comparison: Comparison | None
    no_inference: str
    checks: tuple[Check, ...]

    @property
    def fewest_runs(self) -> int:
        return min(len(by_seed) for by_seed in self.values.values())


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
    samples = {name: list(by_seed.values()) for name, by_seed in values.items()}
    checks = tuple(check for check in run_checks if endpoint.name in check.endpoints)
    comparison, no_inference = None, "; ".join(missing)
    if not missing:
        checks += check_endpoint(pair, endpoint, samples)
        try:
            comparison = compare_samples(
                samples[pair.candidate],
                samples[pair.plan.baseline],
                margin=endpoint.margin,
                scale=endpoint.scale,
                alpha=pair.plan.alpha_per_look,
            )
        except NoInference as error:
            no_inference = str(error)
    return Measurement(
        endpoint=endpoint,
        candidate=pair.candidate,
        baseline=pair.plan.baseline,
        values=values,
        missing=tuple(missing),
        comparison=comparison,
        no_inference=no_inference,
        checks=checks,
    )
