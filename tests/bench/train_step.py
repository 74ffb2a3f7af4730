"""What a trainer costs over the plain loop:  OMP_NUM_THREADS=1 python -m tests.bench.train_step [SAMPLES] [RANKS]

One optimiser step in float32, one thread a rank, on four batches: the demo's (16 prompts x 8 samples with a picture), text
rows of equal length, eight times as many of them (which tells a cost a step from a cost a token), and text rows of very
unequal lengths. Steps of all trainers are interleaved, in random order, in one process. The floor is the same forward pass with
clip_grad_norm_ and AdamW and nothing around it, on this rank's rows alone, without communication; beside it stands
transformers' own forward pass on padded rows. CPU time stays meaningful on a busy machine where wall time does not, but counts
no waiting. The ratios are the result; the times belong to the machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from harness.baselines.megatron_core import MegatronCoreBackend, parallel_state
from molt_core.agents.shapes import ShapesVariant
from molt_core.config import OptimizerConfig, TrainerConfig
from molt_core.models.load import load_policy
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.render import Renderer
from molt_core.train.collate import collate
from molt_core.train.fsdp2 import FSDP2Backend
from molt_core.train.policy import ActionPolicy
from molt_core.train.ranks import HEAP
from molt_core.types import NOT_SAMPLED, ImageInput, Trajectory, Turn
from tests.harness.trainer_cases import (
    MODEL,
    PLAIN,
    backend_step,
    oracle_logits,
    policy_gradient_loss,
    share,
    token_logprobs,
)

PROMPTS, SAMPLES_EACH, ACTIONS, WARMUP = 16, 8, 4, 3
FLOOR = "same forward + AdamW"
OPTIMIZER = OptimizerConfig()


def row(prompt: list[int], actions: np.ndarray, images: tuple[ImageInput, ...] = ()) -> Trajectory:
    start, stop = len(prompt), len(prompt) + len(actions)
    sampled = np.arange(stop) >= start
    return Trajectory(
        token_ids=np.array([*prompt, *actions], np.int32),
        prompt_length=start,
        action_mask=sampled,
        logprobs=np.where(sampled, -5.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        mixed=np.zeros(stop, bool),
        turns=(Turn(start, stop, {}, 0, "stop"),),
        images=images,
    )


def demo_rows(checkpoint: Path, actions: int = ACTIONS) -> list[Trajectory]:
    """The demo's batch, with random answers of ``actions`` tokens."""
    renderer, rng, rows = Renderer(checkpoint), np.random.default_rng(0), []
    for number in range(PROMPTS):
        prompt = renderer.prompt(ShapesVariant().train_item(0, number), number)
        for _ in range(SAMPLES_EACH):
            answer = rng.integers(0, 256, actions)
            rows.append(row(list(prompt.token_ids), answer, prompt.images))
    return rows


def text_rows(lengths: np.ndarray) -> list[Trajectory]:
    """Rows of ``lengths`` tokens, the second half of each sampled."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, 256, length) for length in lengths]
    return [row(i[: len(i) // 2].tolist(), i[len(i) // 2 :]) for i in ids]


def batches(checkpoint: Path) -> dict[str, list[Trajectory]]:
    skewed = np.random.default_rng(2).lognormal(3.0, 1.0, 64).clip(8, 400).astype(int)
    return {
        "demo, with pictures": demo_rows(checkpoint),
        "text, 64 x 40": text_rows(np.full(64, 40)),
        "text, 512 x 40": text_rows(np.full(512, 40)),
        f"text, 64 rows of 8 to {skewed.max()}, {skewed.sum()} tokens": text_rows(skewed),
    }


def plain_step(checkpoint: Path, padded: bool) -> Callable[[list, list], object]:
    """Forward, backward, clip_grad_norm_ and AdamW: our forward pass or, ``padded``, transformers' own."""
    policy = load_policy(checkpoint).train()
    model = policy if padded else ActionPolicy(policy)
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(
        parameters, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
    )

    def step(rows: list, advantages: list) -> None:
        batch = collate(rows, advantages)
        if padded:
            logprobs = token_logprobs(oracle_logits(policy, rows), batch)
        else:
            logprobs, _ = model(batch, PLAIN)
        policy_gradient_loss(logprobs, batch, len(batch.action_ids)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_norm)
        adamw.step()
        adamw.zero_grad()

    return step


def measure(rank: int, ranks: int, samples: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=rank, world_size=ranks)
    checkpoint, trainer = folder / "tiny", TrainerConfig(world_size=ranks, micro_batch_rows=10**6)
    for name, rows in batches(checkpoint).items():
        own = share(rows, rank, ranks, trainer)
        denominator = sum(r.action_tokens for r in rows)
        steps: dict[str, Callable[[], object]] = {
            FLOOR: partial(plain_step(checkpoint, padded=False), *own[0]),
            "transformers, padded": partial(plain_step(checkpoint, padded=True), *own[0]),
        }
        backends = {"FSDP2": FSDP2Backend, "Megatron-Core": MegatronCoreBackend}
        for label, backend_class in backends.items():
            backend = backend_class(checkpoint, MODEL, OPTIMIZER, trainer, samples + WARMUP)
            steps[label] = partial(backend_step, backend, own, denominator)
        taken: dict[str, list[tuple[float, float]]] = {label: [] for label in steps}
        order = np.random.default_rng(
            3
        )  # a step inherits caches and free memory from the one before it
        for _ in range(samples + WARMUP):
            for label in order.permutation(list(steps)):
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                steps[label]()
                taken[label].append((time.perf_counter() - wall, time.process_time() - cpu))
        parallel_state.destroy_model_parallel()
        if rank == 0:
            show(f"{name}; {ranks} rank{'s' * (ranks > 1)}", taken)
    dist.destroy_process_group()


def show(title: str, taken: dict[str, list[tuple[float, float]]]) -> None:
    table = Table("trainer", "wall ms", "over the floor", "CPU ms", "over the floor", title=title)
    kept = {label: np.array(times[WARMUP:]) for label, times in taken.items()}
    for label, times in kept.items():
        # Of the same round, because the machine's speed drifts.
        wall, cpu = np.median(times / kept[FLOOR], axis=0)
        table.add_row(
            label,
            f"{1e3 * statistics.median(times[:, 0]):.1f}",
            f"{wall:.2f}x",
            f"{1e3 * statistics.median(times[:, 1]):.1f}",
            f"{cpu:.2f}x",
        )
    Console(width=100).print(table)


def main(samples: int = 20, ranks: int = 1) -> None:
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_qwen3_vl_moe(Path(folder) / "tiny")
        os.environ.update(HEAP)  # as the trainer's own ranks have it; read when a process starts
        torch.multiprocessing.spawn(measure, (ranks, samples, Path(folder)), nprocs=ranks)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
