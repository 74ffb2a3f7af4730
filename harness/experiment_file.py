"""What an experiment file may say, as models: one protocol, the systems that share it, seeds, endpoints, scales.

The shape carries the honesty. ``protocol`` is everything that all arms share, so an arm cannot override it; a system may set
its trainer and nothing else; an endpoint without a margin and a reason for it is refused. Reading a file: ``harness/spec.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator

from analysis.endpoint import Endpoint
from analysis.plan import MOST_ALPHA, ExclusionRules, LostRunRule, ValidityBounds
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
