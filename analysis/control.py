"""The learning-rate-zero control: what the endpoints show where nothing is learned, and whether it is a control at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.checks import Check, Pair
from analysis.endpoint import Endpoint
from analysis.load import FINISHED, RunRecord
from analysis.matching import differing_keys, protocol
from analysis.summaries import SummaryError, crossing, summarise


def above_control(pair: Pair, endpoint: Endpoint, values: Mapping[str, Sequence[float]]) -> Check:
    """Each arm must rise above runs of the same length whose learning rate was zero, by more than the margin."""
    finished, strange = _controls(pair)
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
        found = found or strange or "no learning-rate-zero control finished"
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


def control_stays_below(pair: Pair, endpoint: Endpoint) -> Check:
    """A threshold that a run without learning crosses by chance measures chance."""
    finished, strange = _controls(pair)
    try:
        crossed = [run.folder for run in finished if crossing(endpoint, run).reached]
        found = f"{', '.join(crossed)} crossed it" if crossed else ""
    except SummaryError as error:
        crossed, found = [str(error)], str(error)
    if not finished:
        found = strange or (
            "no learning-rate-zero control finished, or none is planned (noise_floor.control)"
        )
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


def _controls(pair: Pair) -> tuple[list[RunRecord], str]:
    """(finished runs that are the baseline's but for a learning rate of zero, what is wrong with the others)."""
    sound, wrong = [], []
    for run in pair.experiment.controls:
        if run.state != FINISHED:
            continue
        baseline = pair.arms[pair.plan.baseline]
        faults = ["the baseline has no finished run to compare it with"]
        if baseline:
            faults = _unlike(run, baseline[0], pair.plan.switch)
        if run.config.get("optimizer", {}).get("lr") != 0:
            faults.insert(0, "its learning rate is not 0")
        if faults:
            wrong.append(f"{run.folder} is no control: {', '.join(faults)}")
        else:
            sound.append(run)
    return sound, "; ".join(wrong)


def _unlike(run: RunRecord, other: RunRecord, switch: str | None) -> list[str]:
    """What two runs differ in that a control and a replicate must share."""
    keys = differing_keys([protocol(run.config), protocol(other.config)])
    faults = [f"{key} differs" for key in keys if key not in ("optimizer.lr", switch)]
    if run.run.get("warmup_content_hash") != other.run.get("warmup_content_hash"):
        faults.append("it began from another checkpoint")
    code = [r.run.get("fingerprints", {}).get("code") for r in (run, other)]
    if code[0] != code[1]:
        faults.append("it ran other code")
    if list(run.metrics.index[-1:]) != list(other.metrics.index[-1:]):
        faults.append("it has another length")
    return faults
