"""What a trainer costs over the plain loop:  OMP_NUM_THREADS=1 python -m tests.bench.train_step [SAMPLES]

One optimiser step on the demo's batch (16 prompts x 8 samples, one image a prompt), one rank, one thread, float32: transformers
with torch's AdamW, our FSDP2 trainer and Megatron-Core, interleaved in one process. The ratios are the result; the times belong
to the machine.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from harness.baselines.megatron_core import MegatronCoreBackend
from molt_core.agents.shapes import ShapesVariant
from molt_core.config import OptimizerConfig, TrainerConfig
from molt_core.models.load import load_policy
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.render import Renderer
from molt_core.train.collate import collate
from molt_core.train.fsdp2 import FSDP2Backend
from molt_core.train.policy import ActionPolicy
from molt_core.types import NOT_SAMPLED, Trajectory, Turn
from tests.harness.trainer_cases import MODEL, PLAIN, backend_step, policy_gradient_loss

PROMPTS, SAMPLES_EACH, ACTIONS, WARMUP = 16, 8, 4, 3


def demo_rows(checkpoint: Path, actions: int = ACTIONS) -> list[Trajectory]:
    """The demo's batch, with random answers of ``actions`` tokens."""
    renderer, rng, rows = Renderer(checkpoint), np.random.default_rng(0), []
    for number in range(PROMPTS):
        prompt = renderer.prompt(ShapesVariant().train_item(0, number), number)
        start, stop = len(prompt.token_ids), len(prompt.token_ids) + actions
        for _ in range(SAMPLES_EACH):
            sampled = np.arange(stop) >= start
            rows.append(
                Trajectory(
                    token_ids=np.array(
                        [*prompt.token_ids, *rng.integers(0, 256, actions)], np.int32
                    ),
                    prompt_length=start,
                    action_mask=sampled,
                    logprobs=np.where(sampled, -5.0, 0.0).astype(np.float32),
                    versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
                    mixed=np.zeros(stop, bool),
                    turns=(Turn(start, stop, {}, 0, "stop"),),
                    images=prompt.images,
                )
            )
    return rows


def plain_step(checkpoint: Path, optimizer: OptimizerConfig) -> Callable[[list, list], None]:
    """The floor: the same forward pass, backward, clip_grad_norm_ and AdamW, with nothing around them."""
    model = ActionPolicy(load_policy(checkpoint).train())
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(parameters, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)

    def step(rows: list, advantages: list) -> None:
        batch = collate(rows, advantages)
        logprobs, _ = model(batch, PLAIN)
        policy_gradient_loss(logprobs, batch, len(batch.action_ids)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip_norm)
        adamw.step()
        adamw.zero_grad()

    return step


def main(samples: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        checkpoint = build_tiny_qwen3_vl_moe(Path(folder) / "tiny")
        optimizer, steps = OptimizerConfig(), samples + WARMUP
        rows = demo_rows(checkpoint)
        values = [np.ones(ACTIONS, np.float32)] * len(rows)
        denominator = len(rows) * ACTIONS
        trainers: dict[str, Callable[[], object]] = {}
        plain = plain_step(checkpoint, optimizer)
        trainers["transformers + AdamW"] = lambda: plain(rows, values)
        for name, backend_class in (
            ("FSDP2", FSDP2Backend),
            ("Megatron-Core", MegatronCoreBackend),
        ):
            backend = backend_class(checkpoint, MODEL, optimizer, TrainerConfig(), steps)
            trainers[name] = lambda b=backend: backend_step(b, [(rows, values)], denominator)
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(steps):
            for name, step in trainers.items():
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
        dist.destroy_process_group()
    floor = statistics.median(seconds["transformers + AdamW"][WARMUP:])
    table = Table("trainer", "median ms", "least ms", "over the plain loop")
    for name, taken in seconds.items():
        kept = taken[WARMUP:]
        ratio = statistics.median(kept) / floor
        table.add_row(
            name, f"{1e3 * statistics.median(kept):.1f}", f"{1e3 * min(kept):.1f}", f"{ratio:.2f}x"
        )
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
