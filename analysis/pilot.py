"""What an experiment's file declares, and how far apart the finished runs of a pilot lie: the input of ``power.py``.

plan = declared(Path("experiments/moe_vl.yaml"), "tiny", None)
spreads(plan.endpoints, Path("runs/moe_vl/tiny"))["held-out accuracy"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError

from analysis.endpoint import Endpoint
from analysis.load import Experiment, load_experiment
from analysis.plan import MOST_ALPHA, Plan
from analysis.sample_size import PilotSpread
from analysis.summaries import SummaryError, summarise

LEAST_RUNS = 2
"""Runs of each arm from which a spread can be seen at all."""


@dataclass(frozen=True)
class Declared:
    """The part of an experiment that decides how many runs it needs."""

    endpoints: tuple[Endpoint, ...]
    seeds: tuple[int, ...]
    alpha: float


def declared(experiment: Path | None, scale: str | None, pilot: Path | None) -> Declared:
    """From an experiment's YAML, or from a pilot's frozen plan where no file is given. Raises ValueError."""
    if experiment is None or experiment.is_dir():
        plan = Plan.load((experiment or pilot) / "plan.json")
        return Declared(plan.endpoints, plan.seeds, plan.alpha)
    try:
        data = yaml.safe_load(experiment.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{experiment}: cannot be read: {error}") from error
    if not isinstance(data, dict) or not {"endpoints", "seeds"} <= set(data):
        raise ValueError(f"{experiment}: no experiment: it has no endpoints and seeds")
    scales = data.get("scales", {})
    if scale is not None and scale not in scales:
        raise ValueError(f"--scale {scale}: {experiment} has {', '.join(scales)}")
    patch = scales.get(scale) or {}
    alpha = {**data.get("rules", {}), **patch.get("rules", {})}.get("alpha", MOST_ALPHA)
    if not (isinstance(alpha, float) and 0 < alpha <= MOST_ALPHA):
        raise ValueError(
            f"{experiment}: rules.alpha is {alpha!r}; write a number up to {MOST_ALPHA:g}"
        )
    try:
        endpoints = TypeAdapter(tuple[Endpoint, ...]).validate_python(data["endpoints"])
    except ValidationError as error:
        raise ValueError(f"{experiment}: endpoints: {error}") from error
    return Declared(endpoints, tuple(patch.get("seeds") or data["seeds"]), alpha)


def spreads(endpoints: Sequence[Endpoint], pilot: Path) -> dict[str, list[PilotSpread]]:
    """Endpoint -> the spread of each candidate beside the baseline.

    Raises ValueError where the pilot shows no spread at all, or a ratio of values that are not positive.
    """
    experiment = load_experiment(pilot)
    found: dict[str, list[PilotSpread]] = {}
    for endpoint in endpoints:
        baseline = _tested(experiment, endpoint, experiment.plan.baseline)
        for name in experiment.plan.candidates:
            values = _tested(experiment, endpoint, name)
            if min(len(values), len(baseline)) < LEAST_RUNS or not np.ptp(values) * np.ptp(
                baseline
            ):
                continue
            found.setdefault(endpoint.name, []).append(_spread(name, values, baseline))
    if not found:
        raise ValueError(
            f"{pilot}: no arm and baseline have {LEAST_RUNS} finished runs that differ: no spread to plan by"
        )
    return found


def _spread(name: str, values: np.ndarray, baseline: np.ndarray) -> PilotSpread:
    """Standard deviations with Welch and Satterthwaite's degrees of freedom."""
    errors = [sample.var(ddof=1) / len(sample) for sample in (values, baseline)]
    parts = [e**2 / (len(s) - 1) for e, s in zip(errors, (values, baseline))]
    df = sum(errors) ** 2 / sum(parts)
    return PilotSpread(name, float(values.std(ddof=1)), float(baseline.std(ddof=1)), float(df))


def _tested(experiment: Experiment, endpoint: Endpoint, arm: str) -> np.ndarray:
    """One number a finished run on the tested scale; runs that lack it are no part of a pilot.

    Raises ValueError for a ratio of values that are not positive.
    """
    values = []
    for run in experiment.finished(arm):
        try:
            values.append(summarise(endpoint, run, experiment.plan.exclusion))
        except SummaryError:
            continue
    sample = np.asarray(values, dtype=float)
    if endpoint.scale != "ratio":
        return sample
    if not (sample > 0).all():
        raise ValueError(
            f"{experiment.folder}: {endpoint.name} of {arm} is {sample.min():g} in a run, and a ratio needs positive values; "
            "write scale: absolute with a margin in the unit, or leave that run out of the pilot"
        )
    return np.log(sample)
