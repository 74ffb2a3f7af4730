"""Could the experiment have seen a difference? Checks of one endpoint's values, made before its verdict.

Two arms that learned nothing, that both sit at the ceiling, or that both wait for a third thing are equal for a reason
that has nothing to do with them. A metric whose values do not vary has no spread to judge a difference by.

    checks = check_endpoint(pair, endpoint, values)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.checks import Check, Effect, Pair
from analysis.endpoint import Endpoint
from analysis.load import FINISHED, steady
from analysis.summaries import SummaryError, crossing, initial_value, summarise

JUDGING = ("alpha", "exclusion", "validity", "lost_run_rule", "pairing_unit")
"""Keys of the plan that decide a verdict; changed after results, they may have been chosen to please."""
ONLY_EQUIVALENCE = ("margin", "ceiling", "non_inferiority")
"""Of an endpoint's keys those that a claim of difference does not rest on; any other one changed late ends every claim."""
HARMLESS = ("margin_reason", "unit", "condition")


def check_endpoint(
    pair: Pair, endpoint: Endpoint, values: Mapping[str, Sequence[float]]
) -> tuple[Check, ...]:
    """The checks that apply to ``endpoint``; ``values`` holds one number a finished run, per arm."""
    checks = [] if _censored(pair, endpoint) else [_resolution(endpoint, values)]
    if any(amendment.runs_done for amendment in pair.plan.amendments):
        checks.append(_declared_first(pair, endpoint))
    if endpoint.kind == "learning" and endpoint.threshold is None:
        checks += [
            _learned(pair, endpoint, values),
            _above_control(pair, endpoint, values),
            _headroom(endpoint, values),
        ]
    if endpoint.threshold is not None:
        checks.append(_control_stays_below(pair, endpoint))
    if endpoint.kind == "speed":
        learning = [e for e in pair.plan.primaries if e.kind == "learning" and e.threshold is None]
        checks += [_learned(pair, e, _values(pair, e)) for e in learning]
    if endpoint.includes_waiting and pair.plan.switch is None:  # a switch may be about the waiting
        checks.append(_waiting(pair, endpoint))
    return tuple(checks)


def _censored(pair: Pair, endpoint: Endpoint) -> bool:
    """True where a run never reached the endpoint's threshold: its value is where it ended, for ties or not."""
    if endpoint.threshold is None:
        return False
    return not all(crossing(endpoint, run).reached for run in pair.runs)


def _values(pair: Pair, endpoint: Endpoint) -> dict[str, list[float]]:
    """One number a finished run, per arm; none of an arm where a run gives no number."""
    values: dict[str, list[float]] = {}
    for name, runs in pair.arms.items():
        try:
            values[name] = [summarise(endpoint, run, pair.plan.exclusion) for run in runs]
        except SummaryError:
            values[name] = []
    return values


def _declared_first(pair: Pair, endpoint: Endpoint) -> Check:
    """A margin, a measure or a rule chosen after seeing runs can be chosen to please.

    A rule (which steps count, which runs are valid, when losses refuse, the level) buys a difference as well as an
    equality, and so does an endpoint that is another quantity: then no verdict stands. A margin buys equality only.
    """
    own = f"endpoints.{endpoint.name}"

    def bears(key: str) -> bool:
        return key == own or key.startswith(f"{own}.") or key.split(".")[0] in JUDGING

    late = [a for a in pair.plan.amendments if a.runs_done and any(map(bears, a.diff))]
    changed = sorted({key.removeprefix(f"{own}.") for a in late for key in a.diff if bears(key)})
    changed = [key for key in changed if key not in HARMLESS]
    found = ""
    if changed:
        found = (
            f"post hoc: {', '.join(changed)} changed after {len(late[0].runs_done)} runs were done"
        )
    return Check(
        name=f"{endpoint.name} declared first",
        passed=not changed,
        values={},
        bound="not amended after the first finished run",
        why="a margin, a measure or a rule chosen after seeing the data proves nothing",
        found=found,
        effect="no_equivalence" if set(changed) <= set(ONLY_EQUIVALENCE) else "invalid",
        endpoints=(endpoint.name,),
    )


def _resolution(endpoint: Endpoint, values: Mapping[str, Sequence[float]]) -> Check:
    """Identical values in an arm: no test is possible. Few distinct ones: the metric is coarse."""
    distinct = {name: len(set(sample)) for name, sample in values.items()}
    shown = {name: f"{distinct[name]} distinct of {len(values[name])}" for name in values}
    constant = [name for name, sample in values.items() if len(sample) > 1 and distinct[name] == 1]
    coarse = [name for name, sample in values.items() if distinct[name] < len(sample) / 2]
    found = ""
    if constant:
        found = "; ".join(f"{name}: all values are {values[name][0]:g}" for name in constant)
    elif coarse:
        found = f"{', '.join(coarse)}: fewer distinct values than half the runs"
    return Check(
        name=f"resolution of {endpoint.name}",
        passed=not found,
        values=shown,
        bound="values differ between the runs of an arm",
        why="a metric that does not vary gives no spread to judge a difference by",
        found=found,
        effect="flag" if coarse and not constant else "invalid",
        endpoints=(endpoint.name,),
    )


def _learned(pair: Pair, endpoint: Endpoint, values: Mapping[str, Sequence[float]]) -> Check:
    """Each arm's mean must have moved from where it started by more than the margin, in the right direction.

    That of a primary endpoint guards speed as well: a trainer that teaches nothing may be as fast as it likes.
    """
    sign = 1 if endpoint.direction == "higher" else -1
    gains, starts = {}, {}
    for name, runs in pair.arms.items():
        if runs and len(values[name]):
            starts[name] = float(np.mean([initial_value(endpoint, run) for run in runs]))
            gains[name] = sign * (float(np.mean(values[name])) - starts[name])
    least = {
        name: endpoint.margin * (abs(starts[name]) if endpoint.scale == "ratio" else 1.0)
        for name in gains
    }
    stuck = [name for name in gains if not gains[name] > least[name]]
    effect: Effect = "invalid" if len(stuck) == len(gains) else "no_equivalence"
    return Check(
        name=f"{endpoint.name} was learned",
        passed=None if len(gains) < len(pair.arms) else not stuck,
        values={name: f"gain {gain:+.3g} from {starts[name]:.3g}" for name, gain in gains.items()},
        bound=f"gain over the first evaluation > margin ({endpoint.margin:g})",
        why="arms that learned nothing are equal for the wrong reason",
        found=f"{' and '.join(stuck)} gained no more than the margin" if stuck else "",
        effect=effect,
        endpoints=tuple(
            e.name
            for e in pair.plan.endpoints
            if e.name == endpoint.name or (endpoint.primary and e.kind == "speed")
        ),
    )


def _above_control(pair: Pair, endpoint: Endpoint, values: Mapping[str, Sequence[float]]) -> Check:
    """Each arm must rise above runs of the same length whose learning rate was zero, by more than the margin."""
    finished = [run for run in pair.experiment.controls if run.state == FINISHED]
    sign = 1 if endpoint.direction == "higher" else -1
    passed, found, shown = None, "", {}
    bound = f"mean above the learning-rate-zero control by > margin ({endpoint.margin:g})"
    try:
        floor = [summarise(endpoint, run, pair.plan.exclusion) for run in finished]
    except SummaryError as error:
        floor, found = [], str(error)
    if not pair.plan.has_control:
        found = "the plan has no learning-rate-zero control (noise_floor.control)"
    elif not floor:
        found = found or "no learning-rate-zero control finished"
    else:
        level = float(np.mean(floor))
        rises = {n: sign * (float(np.mean(v)) - level) for n, v in values.items() if len(v)}
        least = endpoint.margin * (abs(level) if endpoint.scale == "ratio" else 1.0)
        stuck = [name for name, rise in rises.items() if not rise > least]
        passed = not stuck if len(rises) == len(values) else None
        shown = {name: f"{rise:+.3g} over {level:.3g}" for name, rise in rises.items()}
        found = f"{' and '.join(stuck)} no more than the margin above it" if stuck else ""
    return Check(
        name=f"control of {endpoint.name}",
        passed=passed,
        values=shown,
        bound=bound,
        why="what a run shows without learning is the floor; equality there says nothing",
        found=found,
        effect="no_equivalence",
        endpoints=(endpoint.name,),
    )


def _control_stays_below(pair: Pair, endpoint: Endpoint) -> Check:
    """A threshold that a run without learning crosses by chance measures chance."""
    finished = [run for run in pair.experiment.controls if run.state == FINISHED]
    try:
        crossed = [run.folder for run in finished if crossing(endpoint, run).reached]
        found = f"{', '.join(crossed)} crossed it" if crossed else ""
    except SummaryError as error:
        crossed, found = [str(error)], str(error)
    if not finished:
        found = "no learning-rate-zero control finished, or none is planned (noise_floor.control)"
    return Check(
        name=f"control of {endpoint.name}",
        passed=not crossed if finished else None,
        values={},
        bound="the learning-rate-zero control stays below the threshold",
        why="a threshold that is crossed without learning measures chance",
        found=found,
        effect="no_equivalence",
        endpoints=(endpoint.name,),
    )


def _headroom(endpoint: Endpoint, values: Mapping[str, Sequence[float]]) -> Check:
    """At the ceiling every arm is equal; stay away from it by more than the margin to claim equality."""
    sign = 1 if endpoint.direction == "higher" else -1
    means = {name: float(np.mean(sample)) for name, sample in values.items() if len(sample)}
    passed, found, bound = (
        None,
        "no ceiling is declared in the plan",
        "distance to the ceiling > margin",
    )
    if endpoint.ceiling is not None:
        room = endpoint.margin * (abs(endpoint.ceiling) if endpoint.scale == "ratio" else 1.0)
        near = [name for name, mean in means.items() if sign * (endpoint.ceiling - mean) <= room]
        passed = not near
        found = f"{' and '.join(near)} within the margin of the ceiling" if near else ""
        bound = f"distance to the ceiling {endpoint.ceiling:g} > margin ({endpoint.margin:g})"
    return Check(
        name=f"headroom of {endpoint.name}",
        passed=passed,
        values={name: f"mean {mean:.3g}" for name, mean in means.items()},
        bound=bound,
        why="at the ceiling a difference cannot show",
        found=found,
        effect="no_equivalence" if endpoint.ceiling is not None else "flag",
        endpoints=(endpoint.name,),
    )


def _waiting(pair: Pair, endpoint: Endpoint) -> Check:
    """Share of the step in which the trainer waits for generation, total over total across steady steps."""
    limit = pair.plan.validity.waiting_share
    shares = {}
    for name, runs in pair.arms.items():
        rows = [steady(run, pair.plan.exclusion) for run in runs]
        if rows and all({"t_wait_s", "wall_s"} <= set(row) for row in rows):
            wall = sum(row["wall_s"].sum() for row in rows)
            if wall > 0:
                shares[name] = float(sum(row["t_wait_s"].sum() for row in rows) / wall)
    high = [name for name, share in shares.items() if share > limit]
    measured = len(shares) == len(pair.arms)
    found = (
        f"{' and '.join(high)} waits longer: generation sets the pace, not the trainer"
        if high
        else ""
    )
    return Check(
        name=f"waiting in {endpoint.name}",
        passed=not high if measured else None,
        values={name: f"{share:.0%} of the step" for name, share in shares.items()},
        bound=f"waiting for generation ≤ {limit:.0%} of the step",
        why="a trainer that waits hides how fast it is",
        found=found if measured else "t_wait_s or wall_s was never recorded",
        effect="no_equivalence",
        endpoints=(endpoint.name,),
    )
