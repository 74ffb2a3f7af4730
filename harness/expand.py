"""From a checked experiment to the runs of one scale: warm-up, conformance, systems x seeds.

Arms are interleaved in time: seed by seed, each seed's arms in an order drawn at random from the experiment's name, so that a
machine that warms up or a cluster that fills over the day does not fall on one arm. The same file gives the same order.

    expansion = expand(load("experiments/moe_vl.yaml"), "tiny", Path("runs"))
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from analysis.plan import Plan, PlannedRun
from harness.container import Image
from harness.experiment_file import Resources, Scale
from harness.identity import Snapshot, changed_snapshot, digest, run_identity, take_snapshot
from harness.inputs import Input, Places, hashes, protocol_inputs, trainer_inputs
from harness.spec import Experiment
from molt_core.config import RunConfig, TrainerConfig

Kind = Literal["warmup", "conformance", "canary", "train"]
Purpose = Literal["replicate", "control", "repeat"]
WARMUP_SECTIONS = ("model", "task", "warmup")
"""What the warm-up's result depends on, with ``optimizer.freeze_router``."""


@dataclass(frozen=True)
class Run:
    """One job: a folder name, what it is, and what it waits for (names of runs that must be done first)."""

    name: str
    kind: Kind
    system: str
    role: str
    seed: int
    identity: str
    config: RunConfig
    resources: Resources
    needs: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    """The files beyond the code that it reads."""
    against: RunConfig | None = None
    """The other arm's configuration, of a conformance run."""
    purpose: Purpose = "replicate"
    """Of a training run: a replicate of its arm, or part of the noise floor."""


@dataclass(frozen=True)
class Expansion:
    """All runs of one scale in the order they are started."""

    experiment: Experiment
    scale: Scale
    folder: Path
    runs: tuple[Run, ...]
    snapshot: Snapshot
    places: Places
    image: Image | None = None
    """The container's file, where the cluster's profile has one."""

    def __getitem__(self, name: str) -> Run:
        return next(run for run in self.runs if run.name == name)

    @property
    def warmup(self) -> Run | None:
        return next((run for run in self.runs if run.kind == "warmup"), None)

    @property
    def trained(self) -> tuple[Run, ...]:
        """The replicates and the noise floor."""
        return tuple(run for run in self.runs if run.kind == "train")

    @property
    def replicates(self) -> tuple[Run, ...]:
        return tuple(run for run in self.trained if run.purpose == "replicate")

    def select(self, pattern: str | None) -> tuple[Run, ...]:
        """Runs whose name contains ``pattern``, and what they need. Raises ValueError where none does."""
        if pattern is None:
            return self.runs
        chosen = {run.name for run in self.runs if pattern in run.name}
        if not chosen:
            names = ", ".join(run.name for run in self.runs[:12])
            more = f" and {len(self.runs) - 12} more" if len(self.runs) > 12 else ""
            raise ValueError(
                f"--only {pattern}: no run's name contains it; the runs are {names}{more}"
            )
        while missing := {n for name in chosen for n in self[name].needs} - chosen:
            chosen |= missing
        return tuple(run for run in self.runs if run.name in chosen)

    def plan(self) -> Plan:
        """What the analysis will hold the experiment to."""
        experiment, rules = self.experiment, self.scale.rules
        return Plan(
            experiment=experiment.name,
            question=experiment.question,
            scale=self.scale.name,
            endpoints=experiment.endpoints,
            arms=experiment.arms,
            seeds=self.scale.seeds,
            exclusion=rules.exclusion,
            lost_run_rule=rules.lost_run_rule,
            validity=rules.validity,
            alpha=rules.alpha,
            pairing_unit=rules.pairing_unit,
            switch=experiment.switch,
            identities={
                run.name: PlannedRun(
                    system=run.system, seed=run.seed, identity=run.identity, purpose=run.purpose
                )
                for run in self.trained
            },
            order=tuple(run.name for run in self.trained),
        )


def expand(
    experiment: Experiment,
    scale_name: str,
    runs_dir: Path,
    *,
    base: Path,
    paths: Mapping[str, str] | None = None,
    write: bool = True,
    image: Image | None = None,
) -> Expansion:
    """Every run of ``scale_name``. ``base``: the folder that relative paths in the protocol start from; ``paths``: places
    that the cluster's profile names.

    With ``write`` False nothing is written, not even the snapshot of the code. Raises ValueError where a lock file would give
    other runs than those it was made from.
    """
    scale = experiment.scales[scale_name]
    snapshot = _snapshot(experiment, runs_dir / ".code", write)
    sha256 = image.sha256 if image is not None else None
    places = Places(base, paths or {})
    runs = tuple(_runs(experiment, scale, snapshot.hash, places, sha256))
    lock = experiment.made_with
    if lock is not None and lock.runs != runs_hash(runs):
        raise ValueError(
            f"{experiment.path}: made_with.runs: these would be other runs than those of the lock (image {lock.image}, here "
            f"{sha256}; else the file or what it names was changed); put it back, or remove `made_with`"
        )
    folder = runs_dir / experiment.name / scale.name
    return Expansion(experiment, scale, folder, runs, snapshot, places, image)


def _snapshot(experiment: Experiment, store: Path, write: bool) -> Snapshot:
    """The code as it is here; of a lock file, that which it was made with, from its copy where the code here is another."""
    lock = experiment.made_with
    here = take_snapshot(store, write=write and lock is None)
    if lock is None:
        return here
    if lock.code == here.hash:
        return take_snapshot(store, write=write)
    kept = Snapshot(lock.code, store / lock.code[:16])
    if changed_snapshot(kept.path, kept.hash):
        raise ValueError(
            f"{experiment.path}: made_with.code: it was made with the code {lock.code[:16]} (commit {lock.commit}), the code "
            f"here is {here.hash[:16]}, and {store} has no copy of that one; check the commit out, or remove `made_with` to "
            "submit it with the code here, as other runs"
        )
    return kept


def runs_hash(runs: Iterable[Run]) -> str:
    """Of their identities, without canaries."""
    return digest([run.identity for run in runs if run.kind != "canary"])


def arms_difference(scale: Scale) -> dict[str, dict[str, Any]]:
    """Dotted key of a run's configuration -> system -> value, where the systems differ."""
    configs = {
        name: flatten(config.model_dump(mode="json", exclude={"seed"}))
        for name, config in scale.configs.items()
    }
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    table = {key: {name: config.get(key) for name, config in configs.items()} for key in keys}
    return {key: row for key, row in table.items() if len(set(map(repr, row.values()))) > 1}


def protocol_of(config: RunConfig) -> dict[str, Any]:
    """What every arm shares, as JSON values."""
    return config.model_dump(mode="json", exclude={"trainer", "seed"})


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping has no keys."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        flat |= flatten(inner, name) if isinstance(inner, dict) else {name: inner}
    return flat


def interleaved(experiment: Experiment, scale: Scale) -> Iterator[tuple[str, int]]:
    """(system, seed): blocks of one seed, the systems of a block in random order."""
    seeds = list(scale.seeds)
    draw = random.Random(digest([experiment.name, scale.name, seeds, sorted(scale.configs)]))
    for seed in seeds:
        systems = sorted(scale.configs)
        draw.shuffle(systems)
        yield from ((system, seed) for system in systems)


def _runs(
    experiment: Experiment, scale: Scale, code: str, places: Places, image: str | None
) -> Iterator[Run]:
    first = next(iter(scale.configs.values()))
    shape = scale.resources.model_dump(mode="json", exclude={"time_limit", "hang_after_s"})
    where = {"name": scale.name, **shape}
    shared = protocol_inputs(first, places)
    own = {name: trainer_inputs(config) for name, config in scale.configs.items()}
    protocol = protocol_of(first)
    on_one_node = scale.resources.model_copy(update={"nodes": 1})
    parents: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    if first.warmup is not None:
        recipe = {key: protocol[key] for key in WARMUP_SECTIONS}
        recipe["freeze_router"] = first.optimizer.freeze_router
        identity = run_identity(
            "warmup", where, recipe, code=code, files=hashes(shared), image=image
        )
        trainer = TrainerConfig(device=first.engine.device)
        warmup = Run(
            name=f"warmup-{identity[:8]}",
            kind="warmup",
            system="warmup",
            role="warmup",
            seed=first.warmup.seed,
            identity=identity,
            config=first.model_copy(update={"trainer": trainer, "seed": first.warmup.seed}),
            resources=on_one_node,
            inputs=shared,
        )
        parents, needs = (identity,), (warmup.name,)
        yield warmup

    conformances: dict[str, str] = {}
    baseline = scale.configs[experiment.baseline]
    for arm in experiment.arms:
        if arm.role == "baseline":
            continue
        config = scale.configs[arm.name]
        pair = {"baseline": baseline.trainer.model_dump(mode="json")}
        pair["candidate"] = config.trainer.model_dump(mode="json")
        both = (*shared, *own[experiment.baseline], *own[arm.name])
        identity = run_identity(
            "conformance",
            where,
            protocol_of(config),
            code=code,
            files=hashes(both),
            image=image,
            system=pair,
            parents=parents,
        )
        name = f"conformance-{arm.name}-{identity[:8]}"
        conformances[arm.name] = name
        yield Run(
            name=name,
            kind="conformance",
            system="conformance",
            role="conformance",
            seed=config.seed,
            identity=identity,
            config=config,
            resources=on_one_node,
            needs=needs,
            inputs=both,
            # Two trainers under one protocol: where a switch sets the arms' protocols apart, the candidate's.
            against=config.model_copy(update={"trainer": baseline.trainer}),
        )

    roles = {arm.name: arm.role for arm in experiment.arms}
    floor = tuple(noise_floor(experiment, scale))
    replicates = ((system, seed, "replicate", 0) for system, seed in interleaved(experiment, scale))
    for system, seed, purpose, number in (*replicates, *floor):
        config = scale.config(system, seed)
        if purpose == "control":
            optimizer = config.optimizer.model_copy(update={"lr": 0.0})
            config = config.model_copy(update={"optimizer": optimizer})
        arm = {"name": system, "trainer": config.trainer.model_dump(mode="json")}
        identity = run_identity(
            "train",
            where,
            protocol_of(config),
            code=code,
            files=hashes((*shared, *own[system])),
            image=image,
            system={**arm, "repeat": number} if number else arm,
            seed=seed,
            parents=parents,
        )
        checks = [conformances[system]] if system in conformances else []
        # A candidate needs its own pair's conformance. The baseline needs none: one arm that does not conform loses no other.
        prefix = "" if purpose == "replicate" else f"{purpose}{number or ''}-"
        yield Run(
            name=f"{prefix}{system}-s{seed}-{identity[:8]}",
            kind="train",
            system=system,
            role=roles[system] if purpose == "replicate" else purpose,
            seed=seed,
            identity=identity,
            config=config,
            resources=scale.resources,
            needs=(*needs, *checks),
            inputs=(*shared, *own[system]),
            purpose=purpose,
        )


def noise_floor(experiment: Experiment, scale: Scale) -> Iterator[tuple[str, int, Purpose, int]]:
    """(system, seed, purpose, number of the repeat) of the optional arms, after all replicates."""
    control, repeats = scale.noise_floor.control, scale.noise_floor.repeats
    if control is not None:
        for seed in control.seeds:
            yield control.system or experiment.baseline, seed, "control", 0
    if repeats is not None:
        for number in range(1, repeats.count + 1):
            for system in repeats.systems or sorted(scale.configs):
                yield system, repeats.seed, "repeat", number
