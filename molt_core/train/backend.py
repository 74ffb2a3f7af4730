"""TrainBackend: the one thing in which two arms of a trainer comparison differ.

A backend owns a model, its sharding and its optimiser. It turns a micro-batch into log-probabilities of the action tokens,
runs backward, steps, and gives its weights out under their Hugging Face names. The softmax over the vocabulary
(``train/logprobs.py``) and everything behind it (correction, loss: ``train/objective.py``) is shared code.

Every method is called on every rank, in the same order: all of them may be collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from molt_core.names import named_class
from molt_core.train.collate import MicroBatch
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.routing import Choice
from molt_core.train.weights import Weight

BUILT_IN = "fsdp2"


@runtime_checkable
class TrainBackend(Protocol):
    """One rank of a trainer. torch.distributed is initialised (gloo on CPU, NCCL on GPU) before construction.

    Construction: ``Backend(checkpoint: Path, model: ModelConfig, optimizer: OptimizerConfig, trainer: TrainerConfig,
    total_steps: int)`` loads the Hugging Face folder ``checkpoint``. With ``total_steps`` 0 it is only ever scored, and may do
    without what a step needs. It raises ValueError for a field of the optimiser or the
    layout that it cannot honour.
    """

    data_rank: int
    """This rank's place among the ranks that see different rows (ranks of one tensor-parallel group share it)."""
    frozen: frozenset[str]
    """Names of the weights that are never stepped, so that an engine needs them once."""
    data_size: int
    """Number of different shares that the rows of a batch are cut into."""

    def action_logprobs(
        self, micro_batch: MicroBatch, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, both ``[N]`` float32, of the N action tokens of ``micro_batch``.

        The n-th belongs to ``micro_batch.action_ids[n]`` and comes from the output at ``action_positions[n] - 1``. Both
        can be differentiated. Use ``logprobs.action_logprobs``, which all backends share.
        """
        ...

    def routing(self) -> tuple[Choice, ...]:
        """What each router did in the last forward pass, over all T tokens of its micro-batch; empty without routers."""
        ...

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Accumulate the gradient of ``loss`` (this rank's part of the weighted sum).

        After ``is_last`` each gradient is the SUM over the data ranks, not their mean. With micro-batches left to come,
        synchronisation may be put off.
        """
        ...

    def optimizer_step(self, apply: bool = True) -> float:
        """Clip to the global norm, step AdamW and the schedule, clear gradients; returns the norm before clipping.

        Where ``apply`` is False, or the norm is 0 or not finite (see ``can_step``), gradients are cleared and nothing else
        changes: no weight, no moment of the optimiser, no place in the schedule.
        """
        ...

    def update_ratio(self) -> float:
        """L2 norm of what the last step added to the weights, over that of the weights; over all ranks, each weight once."""
        ...

    def weights(self, leave_out: frozenset[str] = frozenset()) -> Sequence[Weight]:
        """What the weights are, less those of ``leave_out``, and which rank holds which of their rows: no values yet.

        Names, shapes and dtypes are Hugging Face's in memory, tied weights appear once, and all ranks give the same list.
        ``train/weights.py`` moves the rows, for every backend. Good until the next step.
        """
        ...

    def save(self, folder: Path) -> Future:
        """Copy weights, moments and step count, and write the copy in the background, in the one form of ``train/state.py``.

        The backend may step as soon as this returns; the future ends when this rank's part is on disk.
        """
        ...

    def load(self, folder: Path) -> None:
        """Go on from what any backend saved in any layout; on the same one the next step is the same, bit for bit."""
        ...


def can_step(norm: float) -> bool:
    """Whether a gradient of this global norm is stepped on. A zero one would still move weights, by momentum and decay."""
    return math.isfinite(norm) and norm > 0


def backend_class(name: str) -> type[TrainBackend]:
    """The class behind ``trainer.backend``. Raises ValueError that names the choices."""
    name = {BUILT_IN: "molt_core.train.fsdp2:FSDP2Backend"}.get(name, name)
    return named_class("trainer.backend", name, BUILT_IN)
