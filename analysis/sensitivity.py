"""Could the experiment have seen a difference? Checks of one endpoint's values, made before its verdict.

Two arms that learned nothing, that both sit at the ceiling, or that both wait for a third thing are equal for a reason
that has nothing to do with them. A metric whose values do not vary has no spread to judge a difference by.

    checks = check_endpoint(pair, endpoint, values)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.checks import Check, Effect, Pair
from analysis.control import above_control, control_stays_below
from analysis.endpoint import Endpoint
from analysis.inference import ROUNDING
from analysis.load import steady
from analysis.summaries import SummaryError, crossing, curve, initial_value, summarise

JUDGING = (
    *("alpha", "exclusion", "validity", "lost_run_rule", "pairing_unit"),
    *("switch", "arms", "plan"),
)
"""Keys of the plan that decide a verdict; changed after results, they may have been chosen to please."""
ONLY_EQUIVALENCE = ("margin", "ceiling", "non_inferiority")
"""Of an endpoint's keys those that a claim of difference does not rest on; any other one changed late ends every claim."""
HARMLESS = ("margin_reason", "unit")
WHERE_ADDED = ("condition", "arms")
"""What may be added late, and neither dropped nor changed: a condition narrows a claim, an arm widens Holm's family."""


BY_RECORD = ("final_window_mean", "auc", "steps_to_threshold", "seconds_to_threshold")
"""Summaries whose value depends on the steps at which the field was recorded."""


def check_endpoint(
    pair: Pair, endpoint: Endpoint, values: Mapping[str, Sequence[float]]
) -> tuple[Check, ...]:
    """The checks that apply to ``endpoint``; ``values`` holds one number a finished run, per arm."""
    checks = [] if _censored(pair, endpoint) else [_resolution(endpoint, values)]
    if pair.plan.late:
        checks.append(_declared_first(pair, endpoint))
    if endpoint.summary in BY_RECORD:
        checks.append(_same_records(pair, endpoint))
    if endpoint.kind == "other":
        checks.append(_unguarded(endpoint))
    if endpoint.kind == "learning" and endpoint.threshold is None:
        checks += [
            _learned(pair, endpoint, values),
            above_control(pair, endpoint, values),
            _headroom(endpoint, values),
        ]
    if endpoint.threshold is not None:
        checks.append(control_stays_below(pair, endpoint))
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

    def harmless(key: str, before: object) -> bool:
        own_key = key.removeprefix(f"{own}.")
        added = own_key.split(".")[0] in WHERE_ADDED and before is None
        return own_key in HARMLESS or added

    changes = [
        (key.removeprefix(f"{own}."), len(amendment.runs_done))
        for amendment in pair.plan.late
        for key, (before, _) in amendment.diff.items()
        if bears(key) and not harmless(key, before)
    ]
    changed = sorted({key for key, _ in changes})
    found = ""
    if changed:
        found = f"post hoc: {', '.join(changed)} changed after {changes[0][1]} runs were done"
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
    distinct = {name: _distinct(sample) for name, sample in values.items()}
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


def _distinct(sample: Sequence[float]) -> int:
    """How many different numbers there are, those that differ by rounding counted once."""
    ordered = np.sort(np.asarray(sample, dtype=float))
    if not len(ordered):
        return 0
    return 1 + int((np.diff(ordered) > ROUNDING * np.abs(ordered).max()).sum())


def _same_records(pair: Pair, endpoint: Endpoint) -> Check:
    """An area, a window or a crossing read off other steps is another quantity."""
    steps = {
        name: {tuple(curve(endpoint, run).index) for run in runs}
        for name, runs in pair.arms.items()
    }
    every = set().union(*steps.values())
    found = ""
    if len(every) > 1:
        found = (
            f"{endpoint.field} was recorded at other steps in some runs: {_first_difference(every)}"
        )
    return Check(
        name=f"records of {endpoint.name}",
        passed=len(every) <= 1 if every else None,
        values={
            name: f"{' or '.join(str(len(s)) for s in sorted(seen, key=len))} records"
            for name, seen in steps.items()
        },
        bound="the field is recorded at the same steps in every run",
        why=f"{endpoint.summary} depends on the steps at which it is read",
        found=found,
        effect="invalid",
        endpoints=(endpoint.name,),
    )


def _first_difference(every: set[tuple[int, ...]]) -> str:
    some = set().union(*every) - set.intersection(*map(set, every))
    return f"step {min(some)} is in some and not in all"


def _unguarded(endpoint: Endpoint) -> Check:
    """What is neither speed nor learning has nothing that tells a true equality from an empty one."""
    declared = endpoint.quantity is not None
    return Check(
        name=f"what {endpoint.name} measures",
        passed=False,
        values={},
        bound="speed or learning, whose equality is guarded",
        why="a figure that no difference between the arms could move is equal for nothing",
        found="declared to be neither, so nothing guards its equality"
        if declared
        else f"endpoints.{endpoint.name}.quantity: say learning, speed or other",
        effect="flag" if declared else "no_equivalence",
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


def _headroom(endpoint: Endpoint, values: Mapping[str, Sequence[float]]) -> Check:
    """At the ceiling every arm is equal; stay away from it by more than the margin to claim equality."""
    sign = 1 if endpoint.direction == "higher" else -1
    means = {name: float(np.mean(sample)) for name, sample in values.items() if len(sample)}
    passed, found, bound = False, "", "distance to the ceiling > margin"
    if endpoint.ceiling is None:
        found = "none is declared: say ceiling: 1.0 for a share, or ceiling: unbounded"
    elif endpoint.ceiling == "unbounded":
        passed = True
    else:
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
        effect="no_equivalence",
        endpoints=(endpoint.name,),
    )


def _waiting(pair: Pair, endpoint: Endpoint) -> Check:
    """Share of the step in which the trainer waits for generation, total over total across steady steps."""
    limit = pair.plan.validity.waiting_share
    shares = {}
    for name, runs in pair.arms.items():
        rows = [steady(run, pair.plan.exclusion) for run in runs]
        if rows and all(_all_recorded(row, "t_wait_s", "wall_s") for row in rows):
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
        found=found if measured else "t_wait_s or wall_s is not recorded at every step",
        effect="no_equivalence",
        endpoints=(endpoint.name,),
    )


def _all_recorded(rows: pd.DataFrame, *names: str) -> bool:
    return all(name in rows and rows[name].notna().all() for name in names)
