"""An experiment file, read, checked and resolved. What may stand in it: ``harness/experiment_file.py``.

Every scale is resolved when the file is read, so that a mistake in the cluster's section shows on the laptop.

    experiment = load("experiments/moe_vl.yaml")
    experiment.scales["tiny"].config("molt", seed=0)     # a molt_core.config.RunConfig
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from analysis.endpoint import Endpoint
from analysis.plan import Arm
from harness import source
from harness.contradictions import contradictions, unfit, unrecorded
from harness.experiment_file import ExperimentFile, MadeWith, Rules, Scale
from harness.problems import Finding, Problem, SpecError, section, translate
from harness.source import Document
from molt_core.config import RunConfig, Strict


@dataclass(frozen=True)
class Experiment:
    """A checked experiment. ``scales`` are all resolved."""

    path: Path
    name: str
    question: str
    arms: tuple[Arm, ...]
    endpoints: tuple[Endpoint, ...]
    scales: dict[str, Scale]
    default_scale: str | None
    document: Document
    switch: str | None = None
    made_with: MadeWith | None = None

    @property
    def baseline(self) -> str:
        return next(arm.name for arm in self.arms if arm.role == "baseline")


def load(path: str | Path, base: Path = Path()) -> Experiment:
    """Read, check and resolve an experiment file; ``base``: the folder that its relative paths start from.

    Raises SpecError that lists every problem with its line and fix.
    """
    document = source.read(path)
    try:
        file = ExperimentFile.model_validate(document.data)
    except ValidationError as error:
        found = [_in_file(finding) for finding in translate(error, ExperimentFile)]
        raise SpecError(path, [document.problem(f, f.location) for f in found]) from error
    problems = list(contradictions(document, file))
    scales: dict[str, Scale] = {}
    for name in file.scales:
        resolved, faults = _resolve(document, file, name)
        problems += faults
        if resolved is not None:
            scales[name] = resolved
    problems += unrecorded(document, file, scales, base)
    if problems:
        raise SpecError(path, problems)
    arms = tuple(Arm(name=name, role=system.role) for name, system in file.systems.items())
    defaults = [name for name, scale in file.scales.items() if scale.default_without_slurm]
    return Experiment(
        Path(path),
        file.name,
        file.question,
        arms,
        file.endpoints,
        scales,
        defaults[0] if defaults else None,
        document,
        file.switch,
        file.made_with,
    )


def merge(base: dict[str, Any], patch: dict[str, Any], model: type[Strict]) -> dict[str, Any]:
    """``patch`` over ``base``: sections of ``model`` merge key by key, every other value is replaced whole.

    So a scale changes ``optimizer.lr`` and keeps the other optimiser fields, while a free mapping such as
    ``task.variant`` or a section set to null is what the patch says and nothing else.
    """
    merged = dict(base)
    for key, value in patch.items():
        field = model.model_fields.get(key)
        inner = section(field.annotation) if field is not None else None
        before = base.get(key)
        if inner is not None and isinstance(before, dict) and isinstance(value, dict):
            merged[key] = merge(before, value, inner)
        else:
            merged[key] = value
    return merged


def with_value(protocol: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The protocol with one dotted key set: what an arm of a switch experiment runs under."""
    section_name, _, field = key.partition(".")
    return {**protocol, section_name: {**(protocol.get(section_name) or {}), field: value}}


def _resolve(
    document: Document, file: ExperimentFile, name: str
) -> tuple[Scale | None, list[Problem]]:
    """One scale with its problems; the place of a problem is the scale's own key where it has it, else the base's."""
    patch, problems, configs = file.scales[name], [], {}
    protocol = merge(file.protocol, patch.protocol, RunConfig)
    for system, arm in file.systems.items():
        changes = patch.systems[system].trainer if system in patch.systems else {}
        trainer = merge(arm.trainer, changes, RunConfig.model_fields["trainer"].annotation)
        seed = 0
        try:
            own = protocol if file.switch is None else with_value(protocol, file.switch, arm.switch)
            configs[system] = RunConfig.model_validate(
                {
                    **{key: own[key] for key in own if key not in ("trainer", "seed")},
                    "trainer": trainer,
                    "seed": seed,
                }
            )
        except ValidationError as error:
            for finding in translate(error, RunConfig):
                inside = finding.location
                if inside[:1] == ("trainer",):
                    inside = ("systems", system, *inside)
                else:
                    inside = ("protocol", *inside)
                problems.append(document.problem(finding, ("scales", name, *inside), inside))
    try:
        rules = Rules.model_validate(merge(file.rules, patch.rules, Rules))
    except ValidationError as error:
        for finding in translate(error, Rules):
            inside = ("rules", *finding.location)
            problems.append(document.problem(finding, ("scales", name, *inside), inside))
    if problems:
        return None, problems
    problems = list(unfit(document, name, patch.resources, configs))
    seeds = patch.seeds if patch.seeds is not None else file.seeds
    floor = patch.noise_floor if patch.noise_floor is not None else file.noise_floor
    return Scale(name, configs, seeds, patch.resources, rules, floor), problems


def _in_file(finding: Finding) -> Finding:
    """A key that an arm may not set is more than unknown: say where it belongs."""
    place = finding.location
    arm = place[:1] == ("systems",) or (place[:1] == ("scales",) and place[2:3] == ("systems",))
    if arm and place[-1] in RunConfig.model_fields and place[-1] not in ("trainer",):
        return Finding(
            place,
            "may not differ between arms",
            f"`{place[-1]}` belongs to protocol, which every system shares; a system sets its trainer only",
        )
    return finding
