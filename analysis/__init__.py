"""From run folders to what may be claimed. Start at ``report.py``; ``analysis.compare(ours, baseline, margin=...)``."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """``analysis.compare`` without an import at start: the plan alone must stay light to read."""
    if name == "compare":
        return importlib.import_module("analysis.compare")
    raise AttributeError(f"module 'analysis' has no attribute {name!r}")
