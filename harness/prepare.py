"""Write the folders of planned runs: run.json, config.yaml, the command.

Of a folder that exists only what cannot change a result follows the newest submit, and only until the run is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from harness.expand import Expansion, Run
from harness.inputs import Places, import_path, looks_like_path, weights_folders
from harness.run_folder import RunFolder, edit_json, write_json
from molt_core.config import RunConfig

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""A submit writes a thousand configurations: libyaml's own dumper where PyYAML was built with it."""
FOLLOWS = ("resources", "needs", "command", "import_path", "inputs", "image")
"""Keys of run.json outside the run's identity: limits, what it waits for, how it is started, where its inputs lie."""


def prepare(expansion: Expansion, run: Run, commit: Mapping[str, Any]) -> bool:
    """Make ``run``'s folder, or bring it up to date. True where a folder that was there changed.

    An attempt that works goes on as it was started; the next one reads what is written here.
    """
    folder = RunFolder(expansion.folder / run.name)
    if folder.done is not None:
        return False
    folder.path.mkdir(parents=True, exist_ok=True)
    write_config(folder.path / "config.yaml", run.config, expansion.places)
    if run.against is not None:
        write_config(folder.path / "baseline.yaml", run.against, expansion.places)
    wanted = record(expansion, run, commit)
    if not (folder.path / "run.json").exists():
        write_json(folder.path / "run.json", wanted)
        return False
    with edit_json(folder.path / "run.json") as found:
        newer = {key: wanted[key] for key in FOLLOWS if found.get(key) != wanted[key]}
        found.update(newer)
    return bool(newer)


def record(expansion: Expansion, run: Run, commit: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json at submit; ``commit``: what ``fingerprints.commit`` says of the project."""
    weights = [found for found in run.inputs if found.key == "model.path"]
    return {
        "schema_version": 1,
        "experiment": expansion.experiment.name,
        "scale": expansion.scale.name,
        "kind": run.kind,
        "system": run.system,
        "role": run.role,
        "seed": run.seed,
        "identity": run.identity,
        "needs": list(run.needs),
        "command": command(expansion, run),
        "code_path": os.path.relpath(expansion.snapshot.path, expansion.folder / run.name),
        "import_path": import_path(run.inputs),
        "inputs": [found.record() for found in run.inputs],
        "resources": {
            **run.resources.model_dump(mode="json"),
            "time_limit_s": run.resources.time_limit_s,
        },
        "config": run.config.model_dump(mode="json"),
        "image": asdict(expansion.image) if expansion.image is not None else None,
        **({"warmup_content_hash": weights[0].hash} if weights else {}),
        "submitted": time.time(),
        "git": dict(commit),
        "fingerprints": {"code": expansion.snapshot.hash},
    }


def command(expansion: Expansion, run: Run) -> list[str]:
    """What the job starts; {run}, {scale} and {attempt} are filled in by it, so a brace of a path's own is doubled."""
    checkpoint = "{run}/checkpoint"
    if run.kind != "warmup":
        warmup = expansion.warmup
        checkpoint = (
            f"{{scale}}/{warmup.name}/checkpoint"
            if warmup is not None
            else _local(run.config.model.path, expansion.places)
            .replace("{", "{{")
            .replace("}", "}}")
        )
    module, *arguments = {
        "warmup": ["molt_core.sft", "{run}/config.yaml", "--out", checkpoint],
        "conformance": [
            "harness.conformance",
            "{run}/baseline.yaml",
            "{run}/config.yaml",
            *("--checkpoint", checkpoint, "--out", "{run}/conformance.json"),
        ],
        "train": [
            "molt_core.train",
            "{run}/config.yaml",
            *("--checkpoint", checkpoint, "--run-dir", "{run}", "--attempt", "{attempt}"),
        ],
    }["train" if run.kind == "canary" else run.kind]
    return ["{python}", "-m", module, *arguments]


def write_config(path: Path, config: RunConfig, places: Places) -> None:
    """The configuration as the command reads it: its paths are absolute."""
    data = config.model_dump(mode="json")
    if looks_like_path(config.task.source):
        data["task"]["source"] = _local(config.task.source, places)
    for key, folder in weights_folders(config).items():
        if folder is not None:
            section, name = key.split(".")
            data[section][name] = _local(folder, places)
    data["algorithm"]["plugins"] = [_local(p, places) for p in config.algorithm.plugins]
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _local(path: str, places: Places) -> str:
    """An absolute path where there is something; else unchanged (a name on a hub)."""
    found = places.find(path)
    return path if found is None else str(found)
