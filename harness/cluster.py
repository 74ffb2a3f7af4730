"""Where runs are sent: one profile a cluster, ``slurm/clusters/<name>.yaml``. An experiment never names a cluster.

Which one: ``--cluster NAME`` (or a path), else the variable MOLT_CLUSTER, else the profile that bears the cluster's own name
(``scontrol show config``), else Slurm's defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from harness import source
from harness.identity import ROOT
from harness.problems import Problem, SpecError, translate
from harness.scheduler import seconds
from molt_core.config import Strict

PROFILES = ROOT / "slurm" / "clusters"
VARIABLE = "MOLT_CLUSTER"
OURS = {"job-name", "array", "output", "error"}
"""Directives by which the harness finds a job and its output again."""


class Attempts(Strict):
    """How often a run is put back into the queue, counted apart by why its attempt ended."""

    preempted: int = Field(50, ge=0, description="a job of higher priority took the nodes")
    timed_out: int = Field(20, ge=0, description="the time limit came, and the run had got on")
    failed: int = Field(3, ge=0, description="a node failed, or hardware did")


class Container(Strict):
    """The image that runs work in. What it means in commands: ``harness/container.py``."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    image: str | None = Field(
        None, description="file on every node: .sif of apptainer, .sqsh of pyxis"
    )
    mounts: tuple[str, ...] = Field(
        (), description="SOURCE[:TARGET[:ro]], beside what a run is known to need"
    )
    python: str = Field("/opt/molt/bin/python", description="the environment's Python, inside")
    arguments: tuple[str, ...] = Field((), description="further options of the runtime")

    @field_validator("mounts")
    @classmethod
    def _a_mount_has_a_source(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for mount in mounts:
            source, *rest = mount.split(":")
            target_is_a_place = not rest or rest[0].startswith("/")
            if not (source.startswith("/") and target_is_a_place and rest[1:] in ([], ["ro"])):
                raise ValueError(
                    f"{mount} is no mount; write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, with absolute places"
                )
        return mounts

    @model_validator(mode="after")
    def _an_image_is_a_file(self) -> Container:
        # pyxis takes a name without a slash for a registry's, and a registry's image is fetched by each task, offline or not.
        if self.runtime != "none" and not (self.image or "").startswith("/"):
            raise ValueError(
                f"image {self.image} is no absolute path; build or import the image once (containers/README.md) and name "
                "its file"
            )
        return self


class RaySettings(Strict):
    """The Ray cluster of a run over several nodes."""

    port_base: int = Field(
        20000,
        ge=1024,
        le=32000,
        description="first port; the job's number says which from there on",
    )
    join_within_s: int = Field(180, gt=0, description="seconds within which every node must join")
    object_store_gb: float | None = Field(
        None,
        gt=0,
        description="Ray's object store of a node; none: Ray's choice, 30 % of its memory",
    )


class Cluster(Strict):
    """What differs between clusters and is no business of an experiment."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus: Literal["gpus-per-node", "gres"] = Field(
        "gpus-per-node", description="the directive by which GPUs are asked for"
    )
    gpu_type: str | None = Field(None, description="asked for as TYPE:COUNT where given")
    exclusive: bool = Field(True, description="a run on GPUs has its nodes to itself")
    sbatch: dict[str, str | int | bool | None] = Field(
        default_factory=dict,
        description="any directive by its long name; null or false removes one that would be set",
    )
    environment: dict[str, str | None] = Field(
        default_factory=dict,
        description="exported in the job; a name without a value has that of the shell that submits",
    )
    paths: dict[str, str] = Field(
        default_factory=dict,
        description="name -> absolute place of models and data, which a protocol refers to as $NAME/...",
    )
    time_limit: str | None = Field(
        None,
        description="[days-]HH:MM:SS, the most that a job asks for; a longer run goes on in its next job",
    )
    setup: tuple[str, ...] = Field((), description="lines of shell before the job, `module load`")
    container: Container = Container()
    max_running: int = Field(256, gt=0, description="runs of one submit that work at once")
    warn_s: int = Field(
        120, ge=30, description="seconds between the signal to save and the end of a job, at least"
    )
    attempts: Attempts = Attempts()
    ray: RaySettings = RaySettings()
    bad_node_after: int = Field(
        2, gt=0, description="failures after which an experiment avoids a node"
    )
    bad_nodes_share: float = Field(
        0.25, gt=0, le=0.5, description="of the partition's nodes, how many it avoids at most"
    )

    @field_validator("sbatch")
    @classmethod
    def _leaves_ours(cls, given: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(OURS & set(given))
        if taken:
            raise ValueError(f"{', '.join(taken)}: the harness finds its jobs by it; leave it out")
        return given

    @field_validator("paths")
    @classmethod
    def _a_place_is_absolute(cls, paths: dict[str, str]) -> dict[str, str]:
        for name, place in paths.items():
            if not re.fullmatch(r"\w+", name) or not place.startswith("/"):
                raise ValueError(
                    f"{name}: {place} is no named place; write a word and an absolute path, models: /shared/models"
                )
        return paths

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, value: str | None) -> str | None:
        if value is not None and not seconds(value):
            raise ValueError(f"{value!r} is not a time; write HH:MM:SS, for example 24:00:00")
        return value

    def job_s(self, wanted_s: int) -> int:
        """Seconds that a job asks for, of a run that may take ``wanted_s`` an attempt."""
        return min(wanted_s, int(seconds(self.time_limit or "") or wanted_s))

    @property
    def exports(self) -> dict[str, str]:
        """Those of ``environment`` that have a value."""
        return {key: value for key, value in self.environment.items() if value is not None}

    @property
    def passed(self) -> tuple[str, ...]:
        """Those that have none here: tokens, whose values are written nowhere."""
        return tuple(key for key, value in self.environment.items() if value is None)

    @property
    def directives(self) -> dict[str, str | int | Literal[True]]:
        """Those of ``sbatch`` that are set."""
        return {key: value for key, value in self.sbatch.items() if value not in (None, False)}

    def avoiding(self, bad: Sequence[str]) -> str:
        """The nodes that a job stays away from: the profile's own, and ``bad``."""
        own = self.directives.get("exclude")
        return ",".join([*([str(own)] if own else []), *bad])


def load_cluster(path: Path) -> Cluster:
    """Read a profile. Raises SpecError that names file, line, key and fix."""
    document = source.read(path)
    try:
        return Cluster.model_validate(document.data)
    except ValidationError as error:
        problems = [
            Problem(
                document.line(found.location),
                ".".join(map(str, found.location)),
                found.what,
                found.fix,
            )
            for found in translate(error, Cluster)
        ]
        raise SpecError(path, problems) from error


def choose_cluster(asked: str | None, own_name: str | None = None) -> Cluster:
    """The profile asked for, else the environment's, else the one named as the cluster is. Raises SpecError.

    A name that was asked for must exist; the cluster's ``own_name`` may have no profile.
    """
    name = asked or os.environ.get(VARIABLE)
    if name is None:
        path = PROFILES / f"{own_name}.yaml"
        return load_cluster(path) if path.is_file() else Cluster()
    path = Path(name) if name.endswith(".yaml") else PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.yaml")))
        fix = f"Profiles here: {known}; copy one, or give the path of yours"
        raise SpecError(path, [Problem(0, "", "there is no such cluster profile", fix)])
    return load_cluster(path)
