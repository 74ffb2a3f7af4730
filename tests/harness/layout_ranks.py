"""What each rank of the layout table does. Started by ``torch.multiprocessing.start_processes``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from harness.baselines.megatron_core import MegatronCoreBackend, parallel_state
from molt_core.config import TrainerConfig
from molt_core.train import fsdp2
from molt_core.train.collate import collate
from molt_core.types import Trajectory
from tests.harness.trainer_cases import (
    MODEL,
    OPTIMIZER,
    PLAIN,
    STEPS,
    given_out,
    policy_gradient_loss,
    share,
    trajectories,
)

IMAGES = (1, 2, 0, 1, 0, 0)
"""Images in each row: with several ranks, some get micro-batches without any, or without any row."""
TEXT = "text alone"
CUTS: dict[str, dict] = {
    "all rows": {},
    "row by row": {"micro_batch_rows": 1},
    "three rows": {"micro_batch_rows": 3},
    "48 tokens": {"max_tokens_per_micro_batch": 48},
    "recomputed": {"micro_batch_rows": 2, "activation_checkpointing": True},
    TEXT: {"micro_batch_rows": 2},
}
"""``TEXT`` has a policy and rows of its own."""
WORLDS = {1: tuple(CUTS), 2: tuple(CUTS), 4: ("row by row", "48 tokens", TEXT)}
"""The cuts that are tried at each world size."""
BY_LAYER = ("row by row", "recomputed")
"""The cuts at which FSDP2 shards layer by layer, as it does where layers are large; else the tiny model is one unit."""
BACKENDS = {"fsdp2": fsdp2.FSDP2Backend, "megatron": MegatronCoreBackend}


def rows_of(cut: str, checkpoint: Path) -> list[Trajectory]:
    return trajectories(checkpoint, (0,) * len(IMAGES) if cut == TEXT else IMAGES)


def run(rank: int, world_size: int, port: int, checkpoints: Mapping[str, Path], out: Path) -> None:
    """Three steps by each backend for each cut: losses, norms and weights go to ``out/<world>-<rank>.pt``."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    results = {}
    for name, backend_class in BACKENDS.items():
        for cut in WORLDS[world_size]:
            trainer = TrainerConfig(world_size=world_size, **CUTS[cut])
            checkpoint = checkpoints[cut]
            rows = rows_of(cut, checkpoint)
            fsdp2.UNIT_ELEMENTS = 0 if cut in BY_LAYER else 2**20
            backend = backend_class(checkpoint, MODEL, OPTIMIZER, trainer, STEPS)
            micro_batches = share(rows, backend.data_rank, backend.data_size, trainer)
            steps = [_step(backend, micro_batches, rows) for _ in range(STEPS)]
            weights = given_out(backend)
            results[name, cut] = (*zip(*steps), weights, backend.update_ratio())
            if name == "megatron":
                parallel_state.destroy_model_parallel()
    torch.save(results, out / f"{world_size}-{rank}.pt")
    dist.destroy_process_group()


def _step(backend, micro_batches, rows) -> tuple[float, float]:
    """(loss, gradient norm) of one step over all ranks."""
    total, denominator = torch.zeros(()), sum(row.action_tokens for row in rows)
    for number, (own, advantages) in enumerate(micro_batches):
        batch = collate(own, advantages)
        logprobs, _ = backend.action_logprobs(batch, PLAIN)
        loss = policy_gradient_loss(logprobs, batch, denominator)
        backend.backward(loss, is_last=number == len(micro_batches) - 1)
        total += loss.detach()
    dist.all_reduce(total)
    return float(total), backend.optimizer_step()
