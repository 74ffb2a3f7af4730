"""What each rank of the distributed Megatron-Core tests does. Started by ``torch.multiprocessing.spawn``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from harness.baselines.megatron_core import MegatronCoreBackend, parallel_state
from molt_core.config import TrainerConfig
from molt_core.train.collate import collate
from molt_core.train.split import filler_row
from tests.harness.trainer_cases import (
    MODEL,
    OPTIMIZER,
    STEPS,
    advantages,
    backend_logprobs,
    backend_step,
    backend_training,
    given_out,
    trajectories,
    with_random_records,
)


def share(checkpoint: Path, images_per_row: tuple[int, ...], data_rank: int, data_size: int):
    """This rank's two micro-batches: (rows, advantages). Rows with the fewest images go to the first data rank.

    Its second micro-batch has no sampled token at all; the other ranks' rows are halved.
    """
    rows = trajectories(checkpoint, images_per_row)
    values = advantages(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].images))
    own = order[data_rank * len(rows) // data_size : (data_rank + 1) * len(rows) // data_size]
    if data_rank == 0:
        everything = ([rows[i] for i in own], [values[i] for i in own])
        return [everything, ([filler_row(rows[0])], [np.zeros(0, np.float32)])]
    halves = (own[: len(own) // 2], own[len(own) // 2 :])
    return [([rows[i] for i in half], [values[i] for i in half]) for half in halves]


def train(
    rank: int,
    world_size: int,
    port: int,
    checkpoint: Path,
    images_per_row: tuple[int, ...],
    layouts: dict[str, dict[str, int]],
    out: Path,
) -> None:
    """Three steps in every layout; what each rank saw goes to ``out/<layout>-<rank>.pt``.

    ``out/plain`` is a state that the plain trainer has saved before the last step.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    for name, layout in layouts.items():
        trainer = TrainerConfig(world_size=world_size, layout=layout)

        def build(trainer=trainer):
            return MegatronCoreBackend(checkpoint, MODEL, OPTIMIZER, trainer, STEPS)

        backend = build()
        micro_batches = share(checkpoint, images_per_row, backend.data_rank, backend.data_size)
        denominator = sum(row.action_tokens for row in trajectories(checkpoint, images_per_row))
        untouched = given_out(backend)
        scores = []
        with torch.no_grad():
            for rows, values in micro_batches:
                batch = collate(rows, values)
                logprobs = backend_logprobs(backend, batch)
                scores.append((rows, logprobs, [vars(c) for c in backend.routing()]))
        replaying = MegatronCoreBackend(
            checkpoint,
            MODEL.model_copy(update={"routing_replay": True}),
            OPTIMIZER,
            trainer,
            STEPS,
        )
        replayed = [
            backend_logprobs(replaying, collate(with_random_records(rows)))
            for rows, _ in micro_batches
        ]
        norms, weights = backend_training(backend, micro_batches, denominator)
        interrupted, resumed = build(), build()
        for _ in range(STEPS - 1):
            backend_step(interrupted, micro_batches, denominator)
        interrupted.save(out / f"{name}-checkpoint").result()
        resumed.load(out / f"{name}-checkpoint")
        backend_step(resumed, micro_batches, denominator)
        again = given_out(resumed)
        resumed.load(out / "plain")
        backend_step(resumed, micro_batches, denominator)
        torch.save(
            {
                "data": (backend.data_rank, backend.data_size),
                "untouched": untouched,
                "scores": scores,
                "replayed": replayed,
                "norms": norms,
                "update_ratio": backend.update_ratio(),
                "weights": weights,
                "held": {n: w for e in backend._entries for n, w in zip(e.names, e.whole())},
                "resumed": again,
                "from_plain": given_out(resumed),
            },
            out / f"{name}-{rank}.pt",
        )
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
