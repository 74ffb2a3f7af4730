"""From a model's description to its Hugging Face folder; a built-in one is made there."""

from __future__ import annotations

from pathlib import Path

from molt_core.config import ModelConfig
from molt_core.models.load import atomic_folder, model_folder
from molt_core.models.tiny import BUILDERS


def resolve_checkpoint(model: ModelConfig, cache_dir: Path) -> Path:
    """The policy's folder. A built-in model is built under ``cache_dir`` once; a folder that exists is returned as it is.

    Raises ValueError for an unknown built-in name and FileNotFoundError for a path that is no model folder.
    """
    if model.builtin is None:
        return model_folder("model.path:", model.path)
    if model.builtin not in BUILDERS:
        raise ValueError(
            f"model.builtin: {model.builtin!r} is unknown; choose one of {sorted(BUILDERS)}"
        )
    target = Path(cache_dir) / f"{model.builtin}-seed{model.builtin_seed}"
    if not target.exists():
        with atomic_folder(target) as folder:
            BUILDERS[model.builtin](folder, model.builtin_seed)
    return target
