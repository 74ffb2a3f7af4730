"""What a trainer saves, in one form for every backend: float32 weights and AdamW moments under their Hugging Face names.

    weights.<name>    first_moments.<name>    second_moments.<name>    steps

in the format of torch.distributed.checkpoint. Names, shapes and layout are those in memory (``models/layout.py``), so that any
backend goes on from any other's, at any world size and in any parallel layout, and an export needs no trainer. Each rank
writes what it is given: its shards of a DTensor, or whole tensors, where the ranks share the names among them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

WEIGHTS, FIRST, SECOND = KINDS = ("weights", "first_moments", "second_moments")
STEPS = "steps"

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""Kind to name to tensor."""


def save_state(tensors: Tensors, steps: int, folder: Path, group: dist.ProcessGroup) -> Future:
    """Copy ``tensors`` and write the copy in the background. Collective over ``group``, a CPU group for nothing but this."""
    return dcp.async_save({**tensors, STEPS: steps}, checkpoint_id=folder, process_group=group)


def load_state(tensors: Tensors, folder: Path, group: dist.ProcessGroup) -> int:
    """Fill ``tensors`` in place, each rank its own shards; returns the steps taken. Collective.

    Raises what torch.distributed.checkpoint raises for a name or a shape that was not saved.
    """
    state = {**tensors, STEPS: 0}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    return state[STEPS]


class SavedState:
    """Whole tensors of a saved state, read one at a time and by one process alone."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError where ``folder`` holds no saved state."""
        self.folder = Path(folder)
        if not (self.folder / ".metadata").is_file():
            raise FileNotFoundError(f"{folder}: no saved trainer state (no .metadata)")
        self._sizes = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata

    @property
    def names(self) -> list[str]:
        """Names of the weights, sorted."""
        prefix = f"{WEIGHTS}."
        return sorted(key.removeprefix(prefix) for key in self._sizes if key.startswith(prefix))

    @property
    def steps(self) -> int:
        state = {STEPS: 0}
        self._fill(state)
        return state[STEPS]

    def tensor(self, kind: str, name: str) -> torch.Tensor:
        """Raises KeyError for a name that was not saved."""
        found = self._sizes[f"{kind}.{name}"]
        whole = torch.empty(found.size, dtype=found.properties.dtype)
        self._fill({kind: {name: whole}})
        return whole

    def _fill(self, state: dict) -> None:
        with (
            warnings.catch_warnings()
        ):  # it warns that there is no process group, which is what was asked for
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, checkpoint_id=self.folder, no_dist=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, whole, float32, in-memory layout, in the order of names."""
        for name in self.names:
            yield name, self.tensor(WEIGHTS, name)
