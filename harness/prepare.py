"""Write the folders of planned runs: run.json, config.yaml, the command. Written once; a folder that exists stays as it is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import yaml

from harness import fingerprints
from harness.expand import Expansion, Run
from harness.identity import ROOT, WHOLE_UP_TO, hash_path, looks_like_path
from harness.run_folder import RunFolder, write_json
from molt_core.config import RunConfig


def prepare(expansion: Expansion, run: Run) -> RunFolder:
    """Make ``run``'s folder where it is not there yet."""
    folder = RunFolder(expansion.folder / run.name)
    if (folder.path / "run.json").exists():
        return folder
    folder.path.mkdir(parents=True, exist_ok=True)
    write_config(folder.path / "config.yaml", run.config, expansion.base)
    if run.against is not None:
        write_config(folder.path / "baseline.yaml", run.against, expansion.base)
    write_json(folder.path / "run.json", record(expansion, run))
    return folder


def record(expansion: Expansion, run: Run) -> dict[str, Any]:
    """The content of run.json at submit."""
    weights = expansion.base / (run.config.model.path or "")
    published = run.config.model.path is not None and weights.is_dir()
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
        "resources": {
            **run.resources.model_dump(mode="json"),
            "time_limit_s": run.resources.time_limit_s,
        },
        "config": run.config.model_dump(mode="json"),
        "image": None,
        **({"warmup_content_hash": hash_path(weights, WHOLE_UP_TO)} if published else {}),
        "submitted": time.time(),
        "git": fingerprints.commit(ROOT),
        "fingerprints": {"code": expansion.snapshot.hash},
    }


def command(expansion: Expansion, run: Run) -> list[str]:
    """What the job starts; {run}, {scale} and {attempt} are filled in by it."""
    checkpoint = "{run}/checkpoint"
    if run.kind != "warmup":
        warmup = expansion.warmup
        checkpoint = (
            f"{{scale}}/{warmup.name}/checkpoint"
            if warmup is not None
            else _local(run.config.model.path, expansion.base)
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
    }[run.kind]
    return ["{python}", "-m", module, *arguments]


def write_config(path: Path, config: RunConfig, base: Path) -> None:
    """The configuration as the command reads it: places that were relative to ``base`` are absolute."""
    data = config.model_dump(mode="json")
    if looks_like_path(config.task.source):
        data["task"]["source"] = _local(config.task.source, base)
    if config.model.path is not None:
        data["model"]["path"] = _local(config.model.path, base)
    data["algorithm"]["plugins"] = [_local(p, base) for p in config.algorithm.plugins]
    path.write_text(yaml.safe_dump(data, sort_keys=False))


def _local(path: str, base: Path) -> str:
    """An absolute path where ``path`` exists below ``base``; else unchanged (a name on a hub)."""
    return str((base / path).resolve()) if (base / path).exists() else path
