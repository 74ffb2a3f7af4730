"""Rows of the paper's tables 2 and 3 from finished runs, beside what was published. ``tables.py`` prints them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from analysis import wording
from analysis.compare import judge_samples
from analysis.given import Given
from analysis.inference import Verdict, stand_in_sample
from analysis.load import Experiment, RunRecord, load_experiment, steady
from analysis.verdict import EndpointResult, judge

NONE = "\u2013"
IDENTITY_SLACK = 0.01
"""Share by which tokens/device/s x devices x s/step may miss the tokens of a step (rounding of printed figures)."""

Row = tuple[str, ...]


def feature_rows(name: str, switch: Mapping[str, Any], runs: Path, folder: Path) -> Iterator[Row]:
    """What is known of one switch: measured at each scale that was run, not run, or not built; then as published."""
    if "not_built" in switch:
        yield (name, NONE, NONE, NONE, f"not built: {switch['not_built']}")
    else:
        experiment = yaml.safe_load((folder / switch["experiment"]).read_text())
        found = list(_scales(runs / experiment["name"]))
        for loaded in found:
            yield _feature(name, switch["endpoint"], loaded)
        if not found:
            command = f"python -m harness.submit experiments/paper/{switch['experiment']}"
            yield (name, NONE, NONE, NONE, f"built, not run here: {command}")
    published = switch["published"]
    off, on, effect = (published[key] or NONE for key in ("without", "with", "effect"))
    yield (name, str(off), str(on), str(effect), "published, n and spread unknown")


def _feature(name: str, endpoint: str, experiment: Experiment) -> Row:
    result = next(r for r in judge(experiment) if r.endpoint.name == endpoint)
    measured = result.measurement
    if result.decision.verdict == Verdict.INVALID:
        return (name, NONE, NONE, _effect(result), _origin(experiment, measured.candidate))
    off, on = (
        _mean(list(measured.values[arm].values()), result.endpoint.unit)
        for arm in (measured.baseline, measured.candidate)
    )
    return (name, off, on, _effect(result), _origin(experiment, measured.candidate))


def _effect(result: EndpointResult) -> str:
    """Difference with its interval and the verdict; only the verdict where that is INVALID."""
    c = result.comparison
    if c is None or result.decision.verdict == Verdict.INVALID:
        return result.decision.headline
    size = wording.effect(result.endpoint, c.estimate)
    return f"{size} {wording.interval(result.endpoint, c.ci_low, c.ci_high)}, {result.decision.verdict}"


@dataclass(frozen=True)
class Speed:
    """Throughput of one run over its steady steps, every rate total over total."""

    step_s: float
    tokens_per_device_s: float
    tokens_per_step: float
    devices: float
    steps: int


def speed(run: RunRecord, experiment: Experiment) -> Speed:
    """Raises ValueError where the run did not record what a rate needs."""
    rows = steady(run, experiment.plan.exclusion)
    missing = [
        f for f in ("wall_s", "tokens_forward", "devices") if f not in rows or rows[f].isna().any()
    ]
    if missing or rows.empty:
        raise ValueError(f"{run.folder}: {', '.join(missing) or 'steady steps'} not recorded")
    wall, tokens, devices = (float(rows[f].sum()) for f in ("wall_s", "tokens_forward", "devices"))
    devices /= len(rows)
    return Speed(wall / len(rows), tokens / wall / devices, tokens / len(rows), devices, len(rows))


def throughput_rows(
    definition: Mapping[str, Any], runs: Path
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """(rows, notes) of table 3: each scale's arms as measured, then the published rows, then what each pair supports."""
    rows: list[Row] = []
    notes: list[str] = []
    found = list(_scales(runs / definition["name"]))
    for experiment in found:
        results = judge(experiment)
        rows += _measured_rows(experiment, results)
        notes += [
            f"{r.endpoint.name} at {experiment.plan.scale}, measured: {r.decision.headline}. {r.may_write}"
            for r in results
        ]
    if not found:
        notes.append(
            "No run here yet: python -m harness.submit experiments/paper/table3_throughput.yaml --scale tiny --wait"
        )
    published = definition["published"]
    for row in published["rows"]:
        tokens = row["tokens_per_device_s"] * published["devices"] * row["step_s"]
        rows.append(
            (
                row["system"],
                f"{row['step_s']} ± {row['step_sd']}",
                f"{row['tokens_per_device_s']}",
                _identity(tokens, published["tokens_per_step"]),
                f"published, n = {row['n']}",
            )
        )
    notes.append(_published_verdict(published))
    return tuple(rows), tuple(notes)


def _measured_rows(experiment: Experiment, results: Sequence[EndpointResult]) -> Iterator[Row]:
    """A row an arm; the numbers of an arm whose every speed comparison is INVALID are withheld."""
    for arm in experiment.plan.arms:
        name = f"{arm.name} ({experiment.plan.scale})"
        runs = experiment.finished(arm.name)
        about = [
            r
            for r in results
            if r.endpoint.kind == "speed"
            and arm.name in (r.measurement.candidate, r.measurement.baseline)
        ]
        if runs and about and all(r.decision.verdict == Verdict.INVALID for r in about):
            origin = f"{_origin(experiment, arm.name)}; {about[0].decision.headline}"
            yield (name, NONE, NONE, NONE, origin)
        elif runs:
            yield _speed_row(name, [speed(run, experiment) for run in runs], experiment, arm.name)


def _speed_row(name: str, speeds: Sequence[Speed], experiment: Experiment, arm: str) -> Row:
    """Seconds a step and rate pooled over the runs (total over total: a mean of rates breaks the identity), SD over runs."""
    steps = sum(s.steps for s in speeds)
    wall = sum(s.step_s * s.steps for s in speeds)
    tokens = sum(s.tokens_per_step * s.steps for s in speeds)
    rate = tokens / sum(s.step_s * s.steps * s.devices for s in speeds)
    runs = experiment.finished(arm)
    devices = declared_devices(runs[0]) or fmean(s.devices for s in speeds)
    product = rate * devices * wall / steps
    return (
        name,
        _with_spread(wall / steps, [s.step_s for s in speeds]),
        _with_spread(rate, [s.tokens_per_device_s for s in speeds]),
        _identity(product, tokens / steps),
        _origin(experiment, arm),
    )


def declared_devices(run: RunRecord) -> int | None:
    """Trainer ranks, a critic's own and engine devices of the configuration: what ``devices`` must be. None: unknown."""
    engine, trainer = run.config.get("engine", {}), run.config.get("trainer", {})
    if "count" not in engine or "world_size" not in trainer:
        return None
    separate = (run.config.get("critic") or {}).get("placement") == "separate"
    ranks = trainer["world_size"] * (1 + separate)
    return ranks + engine["count"] * engine.get("tensor_parallel", 1)


def _identity(product: float, tokens: float) -> str:
    """tokens/device/s x devices x s/step against the tokens of a step.

    The devices are those of the configuration, the rate divides by those recorded: a rate over fewer devices shows.
    """
    holds = abs(product - tokens) <= IDENTITY_SLACK * tokens
    return f"{product:,.0f} {'≈' if holds else '≠ (!)'} {tokens:,.0f} tokens"


def _published_verdict(published: Mapping[str, Any]) -> str:
    """What the published means, spreads and n support at a margin of 10 %, by the same tests."""
    samples = {
        row["system"]: list(stand_in_sample(row["step_s"], row["step_sd"], row["n"]))
        for row in published["rows"]
    }
    (record,) = judge_samples(
        Given("step time", samples), published["baseline"], margin=0.1, relative=True, summarised=True,
        direction="lower",
    )  # fmt: skip
    low, high = record["needed_n"] or (None, None)
    return (
        f"Published step times at a margin of 10 %: {record['verdict']} (gap {record['estimate_relative']:+.1%}, Welch "
        f"{wording.probability(record['p_difference'])}, power {record['power_equivalence']:.0%}, n = "
        f"{record.get('needed_n_estimate')} a side would settle it, range {low} to {high}; margin estimated from data)"
    )


def protocol_rows(definition: Mapping[str, Any]) -> tuple[Row, ...]:
    """(line, paper, here): ``here`` is read from the experiment file itself where the line names a key."""
    rows = []
    for line in definition["published"]["protocol"]:
        here = line["here"] if "here" in line else _look_up(definition, line["key"])
        rows.append((line["line"], _text(line["paper"]), _text(here)))
    return tuple(rows)


def _look_up(definition: Mapping[str, Any], key: str) -> Any:
    """A dotted key of the protocol, of the arms' trainer, of the published size's resources, or of the file."""
    first, _, rest = key.partition(".")
    if first == "trainer":
        values = {str(system["trainer"][rest]) for system in definition["systems"].values()}
        return " or ".join(sorted(values))
    if first == "resources":
        there = definition["scales"]["h100x16"]["resources"]
        return f"{there['nodes']} nodes of {there['devices_per_node']} {there['device']} devices"
    value: Any = definition if first in definition else definition["protocol"]
    for part in key.split("."):
        value = value[part]
    return value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)


def _scales(folder: Path) -> Iterator[Experiment]:
    """Every scale of an experiment that has a frozen plan and a finished run."""
    for plan in sorted(folder.glob("*/plan.json")):
        experiment = load_experiment(plan.parent)
        if any(experiment.finished(arm.name) for arm in experiment.plan.arms):
            yield experiment


def _mean(values: Sequence[float], unit: str = "") -> str:
    """Mean and sample SD over runs."""
    return f"{_with_spread(fmean(values), values)} {unit}".rstrip() if values else NONE


def _with_spread(value: float, runs: Sequence[float]) -> str:
    """A figure with the sample SD of its runs, to the same decimal."""
    if len(runs) < 2:
        return wording.number(value)
    spread = stdev(runs)
    decimals = max(0, 1 - math.floor(math.log10(spread))) if spread > 0 else 2
    return (
        f"{value:.{decimals}f} ± {spread:.{decimals}f}" if decimals <= 6 else wording.number(value)
    )


def _origin(experiment: Experiment, arm: str) -> str:
    """measured, on what, from how many runs."""
    runs = experiment.finished(arm)
    hardware = runs[0].run.get("fingerprints", {}).get("hardware", {}) if runs else {}
    names = hardware.get("accelerators") or [hardware.get("processor") or "hardware not recorded"]
    cores = f", {hardware['cores']} cores" if "cores" in hardware else ""
    return f"measured on {', '.join(map(str, names))}{cores}, n = {len(runs)}"
