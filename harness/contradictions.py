"""What every key of an experiment file allows by itself and the whole does not: each with its line and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.experiment_file import ExperimentFile, Resources, Scale
from harness.fields import known_fields, suggestion
from harness.problems import Problem
from harness.source import Document, KeyPath, dotted
from molt_core.config import RunConfig
from molt_core.placement import Node, PlacementError, plan

NAME = re.compile(r"^[a-z][a-z0-9_]*$")
RESERVED = ("warmup", "conformance", "canary", "report", "control", "repeat")
"""Names of folders beside the runs, which no system may take."""
SWITCHABLE = ("engine", "optimizer", "algorithm", "rollout", "loop")
"""Sections whose fields may be an experiment's switch: what is learned from, and how it is measured, stay shared."""


def contradictions(document: Document, file: ExperimentFile) -> Iterator[Problem]:
    """What each key allows by itself and the whole does not."""

    def problem(key: KeyPath, what: str, fix: str) -> Problem:
        return Problem(document.line(key), dotted(key), what, fix)

    for kind, names in (("systems", file.systems), ("scales", file.scales)):
        for name in names:
            if not NAME.fullmatch(name) or name in RESERVED:
                yield problem(
                    (kind, name),
                    "is not a usable name",
                    f"Use a-z, 0-9 and _, and none of {', '.join(RESERVED)}",
                )
    if not NAME.fullmatch(file.name):
        yield problem(("name",), f"{file.name!r} is not a usable name", "Use a-z, 0-9 and _")
    baselines = [name for name, system in file.systems.items() if system.role == "baseline"]
    if len(baselines) != 1:
        yield problem(
            ("systems",),
            f"has {len(baselines) or 'no'} systems with role: baseline",
            "Exactly one arm is the baseline that the others are compared with",
        )
    if len(file.systems) < 2:
        yield problem(("systems",), "has nothing to compare", "Add an arm with role: candidate")
    primaries = [endpoint.name for endpoint in file.endpoints if endpoint.primary]
    if not 1 <= len(primaries) <= 2:
        yield problem(
            ("endpoints",),
            f"has {len(primaries) or 'no'} primary endpoints",
            "Mark one or two with primary: true; the others are exploratory",
        )
    for position, endpoint in enumerate(file.endpoints):
        if endpoint.name in [other.name for other in file.endpoints[:position]]:
            yield problem(
                ("endpoints", position), f"{endpoint.name!r} is given twice", "Rename one"
            )
    seed_lists = {("seeds",): file.seeds} | {
        ("scales", name, "seeds"): scale.seeds
        for name, scale in file.scales.items()
        if scale.seeds is not None
    }
    for key, seeds in seed_lists.items():
        repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
        if repeated or not seeds:
            what = f"repeats {', '.join(map(str, repeated))}" if repeated else "is empty"
            yield problem(key, what, "Each seed is one replicate; give different ones")
        if any(seed < 0 for seed in seeds):
            yield problem(key, "has a negative seed", "Seeds are 0 or more")
    yield from _switches(file, problem)
    floors = {("noise_floor",): file.noise_floor} | {
        ("scales", name, "noise_floor"): scale.noise_floor
        for name, scale in file.scales.items()
        if scale.noise_floor is not None
    }
    for key, floor in floors.items():
        named = [] if floor.control is None else [floor.control.system]
        named += [] if floor.repeats is None else floor.repeats.systems or []
        for system in named:
            if system is not None and system not in file.systems:
                yield problem(
                    key, f"names the system {system}", f"Systems: {', '.join(file.systems)}"
                )
    for key, sections in [(("protocol",), file.protocol)] + [
        (("scales", name, "protocol"), scale.protocol) for name, scale in file.scales.items()
    ]:
        if "trainer" in sections:
            yield problem(
                (*key, "trainer"), "is an arm's choice", "Move it to systems.<name>.trainer"
            )
        if "seed" in sections:
            yield problem((*key, "seed"), "is not protocol", "List seeds under `seeds:`")
    for name, scale in file.scales.items():
        for system in scale.systems:
            if system not in file.systems:
                yield problem(
                    ("scales", name, "systems", system),
                    "is no system of this experiment",
                    f"Systems: {', '.join(file.systems)}",
                )
    defaults = [name for name, scale in file.scales.items() if scale.default_without_slurm]
    if len(defaults) > 1:
        yield problem(
            ("scales", defaults[1], "default_without_slurm"),
            f"is true for {' and '.join(defaults)}",
            "One scale is the default where there is no Slurm",
        )


def unfit(
    document: Document, scale: str, resources: Resources, configs: dict[str, RunConfig]
) -> Iterator[Problem]:
    """Layouts that ask for more accelerators than the scale has, and a built-in model without weights."""
    there = resources.nodes * resources.devices_per_node
    for system, config in configs.items():
        trainer, engine = config.trainer, config.engine
        needs = config.trainer_processes * (trainer.device == "cuda")
        needs += engine.count * engine.tensor_parallel * (engine.device == "cuda")
        if needs > there:
            yield Problem(
                document.line(("scales", scale, "resources")),
                f"scales.{scale}.resources",
                f"gives {there} accelerators and {system} needs {needs} (trainer and critic ranks + engines)",
                "Raise nodes or devices_per_node, or shrink trainer.world_size or engine.count",
            )
        elif resources.nodes > 1:
            gpus = resources.devices_per_node if resources.device == "cuda" else 0
            each = [
                Node(str(n), f"node {n}", resources.cpus_per_node, gpus)
                for n in range(1, resources.nodes + 1)
            ]
            try:
                plan(config, each)
            except PlacementError as error:
                yield Problem(
                    document.line(("scales", scale, "resources")),
                    f"scales.{scale}.resources",
                    f"are too little for {system}: {error}",
                    "Raise nodes, cpus_per_node or devices_per_node",
                )
    config = next(iter(configs.values()))
    if config.model.builtin is not None and config.warmup is None:
        yield Problem(
            document.line(("scales", scale, "protocol", "warmup"), ("protocol", "model")),
            "protocol.warmup",
            "is missing, and a built-in model has no weights to start from",
            "Add a warmup section, or give model.path",
        )


def unrecorded(
    document: Document, file: ExperimentFile, scales: dict[str, Scale], base: Path
) -> Iterator[Problem]:
    """Endpoints on a field that no run would record."""
    configs = [config for scale in scales.values() for config in scale.configs.values()]
    known = known_fields({base / plugin for c in configs for plugin in c.algorithm.plugins})
    for position, endpoint in enumerate(file.endpoints):
        for name in endpoint.fields:
            if name not in known:
                place = ("endpoints", position, "field")
                what = f"{name!r} is recorded by no run"
                yield Problem(document.line(place), dotted(place), what, suggestion(name, known))


def _switches(
    file: ExperimentFile, problem: Callable[[KeyPath, str, str], Problem]
) -> Iterator[Problem]:
    """A switch is one key of the protocol with a value of its own in every arm; without one no arm has a value."""
    given = {name: system.switch for name, system in file.systems.items()}
    if file.switch is None:
        for name, value in given.items():
            if value is not None:
                yield problem(
                    ("systems", name, "switch"),
                    "sets a switch that the experiment does not declare",
                    "Name the key at the top: `switch: engine.prefix_caching`",
                )
        return
    if file.switch.partition(".")[0] not in SWITCHABLE or file.switch.count(".") != 1:
        yield problem(
            ("switch",),
            f"{file.switch} cannot be the one difference between arms",
            f"Name a field of {', '.join(SWITCHABLE)}, e.g. engine.prefix_caching",
        )
    for name, value in given.items():
        if value is None:
            yield problem(
                ("systems", name),
                f"has no value for the switch {file.switch}",
                "Add `switch: VALUE` to it",
            )
    values = [repr(value) for value in given.values() if value is not None]
    if len(set(values)) < len(values):
        yield problem(
            ("switch",), "has the same value in two arms", "Give each arm a value of its own"
        )
