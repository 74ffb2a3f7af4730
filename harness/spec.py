"""What an experiment file may say: one protocol, the systems that share it, seeds, endpoints, scales.

The shape carries the honesty. ``protocol`` is everything that all arms share, so an arm cannot override it; a system may set
its trainer and nothing else; an endpoint without a margin and a reason for it is refused; every scale is resolved when
the file is read, so that a mistake in the cluster's section shows on the laptop.

    experiment = load("experiments/moe_vl.yaml")
    experiment.scales["tiny"].config("molt", seed=0)     # a molt_core.config.RunConfig
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from analysis.endpoint import Endpoint
from analysis.plan import MOST_ALPHA, Arm, ExclusionRules, LostRunRule, ValidityBounds
from harness import source
from harness.contradictions import contradictions, unfit, unrecorded
from harness.problems import Finding, Problem, SpecError, section, translate
from harness.source import Document
from molt_core.config import RunConfig, Strict


class System(Strict):
    """An arm. The allow-list of what may differ between arms is this model."""

    role: Literal["baseline", "candidate"]
    trainer: dict[str, Any] = Field(description="the fields of molt_core.config.TrainerConfig")
    switch: bool | int | float | str | None = Field(
        None, description="this arm's value of the experiment's switch, where it has one"
    )


class SystemPatch(Strict):
    """What a scale changes in an arm."""

    trainer: dict[str, Any]


class Resources(Strict):
    """What one run asks of a machine or a cluster."""

    nodes: int = Field(1, gt=0)
    device: Literal["cpu", "cuda"] = "cpu"
    devices_per_node: int = Field(0, ge=0, description="accelerators of a node")
    cpus_per_node: int = Field(2, gt=0, description="CPU cores of a node that a run keeps busy")
    time_limit: str = Field("01:00:00", description="HH:MM:SS, of one attempt")
    hang_after_s: float = Field(
        600, gt=0, description="an attempt without progress for so long is ended, reason HANG"
    )

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", value):
            raise ValueError(f"{value!r} is not a time; write HH:MM:SS, for example 12:00:00")
        return value

    @property
    def time_limit_s(self) -> int:
        hours, minutes, seconds = map(int, self.time_limit.split(":"))
        return 3600 * hours + 60 * minutes + seconds


class Rules(Strict):
    """How the analysis will judge, fixed before the first run; the defaults are the plan's own."""

    alpha: float = Field(MOST_ALPHA, gt=0, le=MOST_ALPHA)
    exclusion: ExclusionRules = ExclusionRules()
    lost_run_rule: LostRunRule = LostRunRule()
    validity: ValidityBounds = ValidityBounds()
    pairing_unit: Literal["seed"] | None = Field(
        None, description="seed: the arms' runs of a seed are compared as pairs"
    )


class Control(Strict):
    """Runs with learning rate zero: what the endpoints show where nothing is learned."""

    seeds: tuple[int, ...] = Field((0,), min_length=1)
    system: str | None = Field(None, description="default: the baseline")


class Repeats(Strict):
    """The same system and seed run again: how far two runs part that share all they can share."""

    seed: int = Field(0, ge=0)
    count: int = Field(1, gt=0, description="further runs of each system with that seed")
    systems: tuple[str, ...] | None = Field(None, description="default: every system")


class NoiseFloor(Strict):
    """Optional arms that enter no comparison and are shown beside the differences."""

    control: Control | None = None
    repeats: Repeats | None = None


class ScalePatch(Strict):
    """The same experiment on another machine: sections merge into the protocol, values replace."""

    default_without_slurm: bool = False
    protocol: dict[str, Any] = Field(default_factory=dict)
    systems: dict[str, SystemPatch] = Field(default_factory=dict)
    seeds: tuple[int, ...] | None = None
    noise_floor: NoiseFloor | None = Field(None, description="replaces the experiment's own")
    resources: Resources = Resources()
    rules: dict[str, Any] = Field(default_factory=dict)


class MadeWith(Strict):
    """What a lock file was written from (``harness/lock.py``). A submit of it gives the same runs, or is refused."""

    code: str = Field(description="hash of the code that the runs import")
    runs: str = Field(description="hash of their identities")
    commit: str = Field(description="of the project, and whether the tree differed from it")
    packages: str = Field(
        description="hash of the versions that were installed; recorded, not compared"
    )
    image: str | None = Field(None, description="sha256 of the container's file")
    at: str = Field(description="when")


class ExperimentFile(Strict):
    """The top level of an experiment file."""

    name: str = Field(description="also the name of its folder under runs/")
    question: str = Field(min_length=1, description="the one question it answers")
    protocol: dict[str, Any] = Field(description="what every arm shares")
    switch: str | None = Field(
        None,
        description="the one key of the protocol in which the arms differ, e.g. engine.prefix_caching: an experiment "
        "about a feature and not about a trainer",
    )
    systems: dict[str, System] = Field(description="the arms, one of them with role: baseline")
    seeds: tuple[int, ...] = Field(min_length=1)
    endpoints: tuple[Endpoint, ...] = Field(description="what is measured, with its margin")
    noise_floor: NoiseFloor = NoiseFloor()
    rules: dict[str, Any] = Field(default_factory=dict)
    published: dict[str, Any] = Field(
        default_factory=dict,
        description="what a paper printed, for analysis.tables; it decides nothing about a run",
    )
    scales: dict[str, ScalePatch] = Field(min_length=1)
    made_with: MadeWith | None = Field(None, description="of a lock file alone")


@dataclass(frozen=True)
class Scale:
    """One scale, resolved: nothing is left to merge."""

    name: str
    configs: dict[str, RunConfig]
    seeds: tuple[int, ...]
    resources: Resources
    rules: Rules
    noise_floor: NoiseFloor

    def config(self, system: str, seed: int) -> RunConfig:
        return self.configs[system].model_copy(update={"seed": seed})


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
