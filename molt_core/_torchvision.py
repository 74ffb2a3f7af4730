"""Let torchvision import beside a torch build that it was not compiled for.

Image processors import torchvision for its pure-torch resizing only, but the wheel that a package index offers beside a CPU
torch stops at "operator torchvision::nms does not exist". The two missing operator schemas are enough for it. With a matching
build nothing is touched. An import hook, because every process needs it (workers, the engine's own process) and most
never import torchvision.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin:
            _define_missing_operators(Path(spec.origin).parent)
        return spec


def _define_missing_operators(package: Path) -> None:
    import torch

    try:
        for library in package.glob("_C*.so"):
            torch.ops.load_library(str(library))
        torch.ops.torchvision.nms  # noqa: B018
    except (OSError, AttributeError, RuntimeError):
        for schema in _SCHEMAS:
            torch.library.define(
                f"torchvision::{schema.split('(')[0]}", schema[schema.index("(") :]
            )


def install() -> None:
    """Idempotent; does nothing once torchvision is imported."""
    if "torchvision" not in sys.modules and not any(
        type(f).__name__ == "_BeforeTorchvision" for f in sys.meta_path
    ):
        sys.meta_path.insert(0, _BeforeTorchvision())
