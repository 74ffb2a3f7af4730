"""What would fail on this machine, found before anything starts: one sentence a problem, each with its remedy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from harness.expand import Expansion
from harness.inputs import find_module, looks_like_path, weights_folders

FREE_DISK_GB = 2
"""What an experiment may write before anybody looks: logs, metrics, a few checkpoints of a small model."""


def problems(expansion: Expansion, *, cluster: bool) -> list[str]:
    """Everything that stands in the way of running ``expansion`` here; ``cluster``: on Slurm's nodes instead."""
    found = [*_inputs(expansion), *_imports(expansion), *_disk(expansion)]
    return found if cluster else [*found, *_machine(expansion)]


def _inputs(expansion: Expansion) -> Iterator[str]:
    config, where = expansion.runs[0].config, expansion.experiment.path.name
    named = {f"algorithm.plugins[{n}]": p for n, p in enumerate(config.algorithm.plugins)}
    if looks_like_path(config.task.source):
        named["task.source"] = config.task.source
    folders = {key: name for key, name in weights_folders(config).items() if name is not None}
    for key, name in {**named, **folders}.items():
        try:
            path = expansion.places.at(name)
        except ValueError as error:
            yield f"protocol.{key}: {error}"
            continue
        if key in folders and not path.is_dir():
            yield (
                f"protocol.{key}: {path} is no folder here; download the checkpoint first (compute nodes are often "
                f"offline) and give its folder in {where}"
            )
        elif not path.exists():
            yield f"protocol.{key}: {path} does not exist; put it there, or change the path in {where}"


def _imports(expansion: Expansion) -> Iterator[str]:
    named = {"protocol.task.agent": expansion.runs[0].config.task.agent}
    for name, config in expansion.scale.configs.items():
        named[f"systems.{name}.trainer.backend"] = config.trainer.backend
    for key, name in named.items():
        module, separator, _ = name.partition(":")
        if separator and find_module(module) is None:
            yield f"{key}: no module {module} on the import path of this shell; mend the name, or set PYTHONPATH"
    missing = sorted(name for name in packages(expansion) if find_module(name) is None)
    if missing:
        yield f"not installed: {', '.join(missing)}; run `make setup`"


def packages(expansion: Expansion) -> set[str]:
    """What the runs import first of all."""
    trainers = [config.trainer.backend for config in expansion.scale.configs.values()]
    megatron = {"megatron.core"} if any("megatron" in name for name in trainers) else set()
    return {"torch", "ray", "vllm", *megatron}


def disk_needed_gb(expansion: Expansion) -> float:
    """What must be free: logs and records, and all checkpoints that the runs may keep, where the protocol bounds them."""
    kept = (run.config.checkpoint.max_disk_gb or 0.0 for run in expansion.trained)
    return FREE_DISK_GB + sum(kept)


def _disk(expansion: Expansion) -> Iterator[str]:
    place, needed = expansion.folder, disk_needed_gb(expansion)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if free < needed:
        yield f"{place.resolve()} has {free:.1f} GB free and the runs need {needed:.1f}; make room, or use --runs"
    if not os.access(place, os.W_OK):
        yield f"{place.resolve()} cannot be written; use --runs with a folder of yours"


def _machine(expansion: Expansion) -> Iterator[str]:
    resources, name = expansion.scale.resources, expansion.scale.name
    if resources.nodes > 1:
        yield (
            f"scale {name} asks for {resources.nodes} nodes and there is no Slurm here (no sbatch); submit it on the cluster, "
            f"or take another scale{_alternative(expansion)}"
        )
    elif resources.device == "cuda" and not Path("/proc/driver/nvidia").exists():
        yield (
            f"scale {name} asks for {resources.devices_per_node} GPUs and this machine has none"
            f"{_alternative(expansion)}"
        )
    available = psutil.virtual_memory().available / 1e9
    if available < 3:
        yield f"{available:.1f} GB of memory are free and an engine with its trainer takes 3; close something"


def _alternative(expansion: Expansion) -> str:
    default = expansion.experiment.default_scale
    return f" (--scale {default})" if default not in (None, expansion.scale.name) else ""
