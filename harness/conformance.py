"""Do two trainers make the same update? Three optimiser steps of both on one batch, from one checkpoint.

    python -m harness.conformance BASELINE.yaml CANDIDATE.yaml --checkpoint FOLDER --out conformance.json

The two run configurations may differ in ``trainer`` only. Each arm runs in processes of its own, in its own layout, through the
same code as a training run (``forward_backward``, then ``optimizer_step``). The batch is synthetic and fixed: rows of several
lengths, with none, one and two images, advantages of both signs. Compared are the log-probabilities before the first step,
loss and gradient norm at each step, and the weights after the last one, relative to how far they moved. Exit code 0 whether the
arms agree or not: ``passed`` and ``reasons`` in the file say which; the harness starts no run of a pair that failed.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from transformers import AutoConfig

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.registry import load_plugins
from molt_core.config import RunConfig, load_run_config
from molt_core.models.layout import Architecture
from molt_core.models.load import excluded_token_ids, expert_layers, iterate_weights
from molt_core.train.backend import backend_class
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.objective import forward_backward, score
from molt_core.train.split import shares
from molt_core.train.weights import whole_weights
from molt_core.types import NOT_SAMPLED, ImageInput, Trajectory, Turn

STEPS = 3
IMAGES_PER_PROMPT = (1, 0, 2, 1, 0, 1, 2, 1)
"""Images of each prompt of the batch."""
SAMPLES_PER_PROMPT = 2


@dataclass(frozen=True)
class Tolerances:
    """Bounds on the differences between two arms, a and b.

    logprob: largest |difference| before the first step, in nats. loss: largest |difference| at a step, over the mean
    |advantage|. grad_norm: largest relative difference at a step. update: ||w_a - w_b|| / ||w_b - w_0|| over all weights, w_0
    being the checkpoint. update_tensor: the same of the worst single tensor, so that a small one cannot hide behind large
    ones; tensors of which no element moved by a hundredth of the largest update are left out: their gradient is
    nothing but rounding.
    """

    logprob: float
    loss: float
    grad_norm: float
    update: float
    update_tensor: float


TOLERANCES = {
    "float32": Tolerances(1e-5, 1e-5, 1e-4, 1e-3, 5e-3),
    "bfloat16": Tolerances(0.1, 0.02, 0.05, 0.5, 1.0),
}
"""By ``model.dtype``. In float32 the tiny policy's trainers measure 2e-6, 1e-6, 1e-5, 1e-4 and 6e-4.
bfloat16 has 8 bits: it can show a wrong layout or a wrong loss, and little more."""


def conformance(config_a: RunConfig, config_b: RunConfig, checkpoint: Path) -> dict[str, Any]:
    """Contents of ``conformance.json``: what each arm did, differences, tolerances, ``passed`` and ``reasons``.

    Raises ValueError where the configurations differ outside ``trainer``, or where a backend refuses its own.
    """
    check_comparable(config_a, config_b)
    with tempfile.TemporaryDirectory() as scratch:
        arms = []
        for name, config in (("a", config_a), ("b", config_b)):
            folder = Path(scratch) / name
            folder.mkdir()
            torch.multiprocessing.spawn(
                _train_arm,
                (config, Path(checkpoint).resolve(), folder),
                nprocs=config.trainer.world_size,
            )
            arms.append(json.loads((folder / "arm.json").read_text()))
        weights = compare_weights(checkpoint, *(_stored(Path(scratch) / name) for name in "ab"))
    return verdict(arms, weights, config_a.model.dtype)


def check_comparable(config_a: RunConfig, config_b: RunConfig) -> None:
    """Raise ValueError where two configurations differ outside ``trainer``."""
    a, b = (config.model_dump(exclude={"trainer"}) for config in (config_a, config_b))
    differing = sorted(key for key in a if a[key] != b[key])
    if differing:
        raise ValueError(
            f"the configurations differ in {differing}; a conformance compares trainers under one protocol: "
            "only the trainer section may differ"
        )


def verdict(arms: list[dict[str, Any]], weights: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Differences of two arms' records against the tolerances of ``dtype``. Pure."""
    tolerances = TOLERANCES[dtype]
    a, b = arms
    found = {
        "logprob_difference": _largest(np.subtract(a["logprobs"], b["logprobs"])),
        "loss_difference": _largest(np.subtract(a["loss"], b["loss"]) / a["mean_advantage"]),
        "grad_norm_difference": _largest(np.divide(a["grad_norm"], b["grad_norm"]) - 1),
        "update_difference": weights["update_difference"],
        "update_tensor_difference": weights["update_tensor_difference"],
    }
    bounds = dict(zip(found, asdict(tolerances).values(), strict=True))
    reasons = [
        f"{name} is {value:.3g}, its bound {bounds[name]:g}"
        + (f" ({weights['worst_tensor']})" if name == "update_tensor_difference" else "")
        for name, value in found.items()
        if not value <= bounds[name]
    ]
    if not weights["largest_update"] > 0:
        reasons.append("the weights did not move: there was no update to compare")
    for arm in arms:
        del arm["logprobs"]
    return finite_only(
        {
            "passed": not reasons,
            "reasons": reasons,
            "detail": "; ".join(reasons),
            "steps": STEPS,
            **found,
            **weights,
            "tolerances": bounds,
            "arms": arms,
        }
    )


def finite_only(figures: Any) -> Any:
    """The figures with None for what is not finite: JSON has no such number, and the reasons name it."""
    if isinstance(figures, dict):
        return {key: finite_only(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [finite_only(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


def _largest(values: np.ndarray) -> float:
    """Largest magnitude; NaN counts as infinite."""
    return float(np.abs(np.nan_to_num(values, nan=math.inf)).max())


def synthetic_rows(checkpoint: Path, max_length: int) -> list[Trajectory]:
    """The batch: samples of prompts of text and images, three to six actions each, none of them an excluded id.

    Of text alone where the policy has no vision tower.
    Raises ValueError where ``max_length`` cuts every row.
    """
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    excluded = np.array(excluded_token_ids(checkpoint), np.int64)
    allowed = np.setdiff1d(np.arange(vocabulary), excluded)
    rng = np.random.default_rng(0)
    rows = []
    for number, count in enumerate(IMAGES_PER_PROMPT):
        ids = list(rng.choice(allowed, 2 + number % 5))
        images = []
        for _ in range(count if "vision_config" in config else 0):
            vision = config["vision_config"]
            merge, patch = vision["spatial_merge_size"], vision["patch_size"]
            width = vision.get("in_channels", 3) * vision["temporal_patch_size"] * patch**2
            grid = (1, 2 * merge, (2 + rng.integers(3)) * merge)
            length = grid[1] * grid[2] // merge**2
            ids.append(config["vision_start_token_id"])
            pixels = np.zeros((grid[1] * patch, grid[2] * patch, 3), np.uint8)
            patches = rng.standard_normal((grid[1] * grid[2], width)).astype(np.float32)
            images.append(ImageInput(pixels, patches, grid, len(ids), length))
            ids += [config["image_token_id"]] * length + [config["vision_end_token_id"]]
        for sample in range(SAMPLES_PER_PROMPT):
            actions = rng.choice(allowed, 3 + (number + sample) % 4)
            if len(ids) + len(actions) <= max_length:
                rows.append(_row(ids, actions, images, -math.log(len(allowed))))
    if not rows:
        raise ValueError(f"model.max_length {max_length} is too short for any row of the batch")
    return rows


def _row(
    prompt: list[int], actions: np.ndarray, images: list[ImageInput], logprob: float
) -> Trajectory:
    token_ids = np.array([*prompt, *actions], np.int32)
    action = np.arange(len(token_ids)) >= len(prompt)
    return Trajectory(
        token_ids=token_ids,
        prompt_length=len(prompt),
        action_mask=action,
        logprobs=np.where(action, logprob, 0).astype(np.float32),
        versions=np.where(action, 0, -1).astype(np.int32),
        mixed=np.zeros(len(token_ids), bool),
        turns=(Turn(len(prompt), len(token_ids), {}, 0, "stop"),),
        images=tuple(images),
    )


def with_routes(rows: Sequence[Trajectory], checkpoint: Path) -> list[Trajectory]:
    """The rows with random experts recorded for every token but their last, as an engine leaves it: both arms replay them."""
    text = AutoConfig.from_pretrained(checkpoint, local_files_only=True).get_text_config()
    layers, rng = len(expert_layers(checkpoint)), np.random.default_rng(2)
    recorded = []
    for row in rows:
        scores = rng.random((len(row.token_ids), layers, text.num_experts))
        chosen = scores.argsort(-1)[..., : text.num_experts_per_tok].astype(np.int16)
        chosen[-1] = NOT_SAMPLED
        recorded.append(replace(row, routed_experts=chosen))
    return recorded


def _train_arm(rank: int, config: RunConfig, checkpoint: Path, folder: Path) -> None:
    """One rank of one arm. Rank 0 leaves ``arm.json`` and the weights in ``folder``."""
    trainer = config.trainer
    torch.set_num_threads(trainer.threads)
    if trainer.device == "cuda":
        torch.cuda.set_device(rank)
    load_plugins(config.algorithm.plugins)
    dist.init_process_group(
        "nccl" if trainer.device == "cuda" else "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=trainer.world_size,
    )
    backend = backend_class(trainer.backend)(
        checkpoint, config.model, config.optimizer, trainer, config.loop.steps
    )
    rows = synthetic_rows(checkpoint, config.model.max_length)
    if config.model.routing_replay:
        rows = with_routes(rows, checkpoint)
    rng = np.random.default_rng(1)
    advantages = [rng.standard_normal(row.action_tokens).astype(np.float32) for row in rows]
    excluded = torch.tensor(excluded_token_ids(checkpoint), device=trainer.device)
    distribution = ActionDistribution(config.rollout.sampling.temperature, excluded)
    _, logprobs, tied = score(
        backend, rows, distribution=distribution, tie_gap=config.probe.tie_gap
    )
    rollouts = on_policy(rows, advantages, logprobs.cpu().numpy())
    micro_batches = shares(rollouts, backend.data_size, trainer)[backend.data_rank]
    losses, norms = [], []
    for _ in range(STEPS):
        sums = forward_backward(
            backend,
            micro_batches,
            algorithm=config.algorithm,
            distribution=distribution,
        )
        losses.append(_sum_over_data_ranks(sums["loss"], backend.data_size))
        norms.append(backend.optimizer_step())
    published = Architecture.of(checkpoint).published(whole_weights(backend.weights()))
    for number, (name, tensor) in enumerate(published):  # rank 0's
        torch.save((name, tensor.clone()), folder / f"{number:06d}.pt")
    if rank == 0:
        record = {
            "backend": trainer.backend,
            "layout": trainer.layout,
            "world_size": trainer.world_size,
            "loss": losses,
            "grad_norm": norms,
            "mean_advantage": float(np.abs(np.concatenate(advantages)).mean()),
            "tokens_router_tied": int(tied.sum()),
            "logprobs": logprobs.tolist(),
        }
        (folder / "arm.json").write_text(json.dumps(record))
    dist.destroy_process_group()


def on_policy(
    rows: Sequence[Trajectory], advantages: Sequence[np.ndarray], logprobs: np.ndarray
) -> list[WeightedRollout]:
    """The rows as if the policy of the first step had sampled them, each token weighed alike.

    Under any other sampler's log-probabilities importance weights grow with the exponential of what a step changes, and three
    steps of one trainer in two micro-batch sizes would differ by more than two trainers may.
    """
    tokens, edges = len(logprobs), np.cumsum([row.action_tokens for row in rows])[:-1]
    rollouts = []
    for row, values, sampled in zip(rows, advantages, np.split(logprobs, edges)):
        behaviour = np.zeros(len(row.token_ids), np.float32)
        behaviour[row.action_mask] = sampled
        weights = np.full(len(values), 1 / tokens, np.float32)
        segments = (replace(row, logprobs=behaviour),)
        rollouts.append(WeightedRollout(segments, values, weights, sampled))
    return rollouts


def _sum_over_data_ranks(value: float, data_size: int) -> float:
    """Every data rank counts once, however many ranks share its rows."""
    total = torch.tensor(value, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        total = total.cuda()
    dist.all_reduce(total)
    return float(total) * data_size / dist.get_world_size()


def _stored(folder: Path) -> dict[str, Path]:
    """Tensor name to its file."""
    return {torch.load(file)[0]: file for file in sorted(folder.glob("*.pt"))}


def compare_weights(
    checkpoint: Path, a: Mapping[str, Path], b: Mapping[str, Path]
) -> dict[str, Any]:
    """How far two arms' weights lie from each other, in units of how far b moved from ``checkpoint``.

    Raises ValueError where the arms' weights differ in name or shape from each other.
    """
    if a.keys() != b.keys():
        raise ValueError(f"the arms gave out different weights: {sorted(a.keys() ^ b.keys())}")
    figures = {
        name: _distances(torch.load(a[name])[1], torch.load(b[name])[1], initial)
        for name, initial in iterate_weights(checkpoint)
        if name in a
    }
    largest = max(figure["moved_largest"] for figure in figures.values())
    moved = {n: f for n, f in figures.items() if f["moved_largest"] > 0.01 * largest}
    ratios = {n: _ratio(f["apart"], f["moved"]) for n, f in moved.items()}
    worst = max(ratios, key=ratios.get, default="")
    return {
        "update_difference": _ratio(
            math.hypot(*(f["apart"] for f in figures.values())),
            math.hypot(*(f["moved"] for f in figures.values())),
        ),
        "update_tensor_difference": ratios.get(worst, 0.0),
        "worst_tensor": worst,
        "largest_difference": max(f["apart_largest"] for f in figures.values()),
        "largest_update": largest,
        "tensors": len(figures),
        "tensors_that_moved": len(moved),
    }


def _distances(a: torch.Tensor, b: torch.Tensor, initial: torch.Tensor) -> dict[str, float]:
    if a.shape != b.shape:
        raise ValueError(f"the arms gave out shapes {tuple(a.shape)} and {tuple(b.shape)}")
    apart, moved = a.double() - b.double(), b.double() - initial.double()
    return {
        "apart": float(apart.norm()),
        "moved": float(moved.norm()),
        "apart_largest": float(apart.abs().max()),
        "moved_largest": float(moved.abs().max()),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def main(
    config_a: Annotated[Path, typer.Argument(help="run configuration of one arm (YAML)")],
    config_b: Annotated[Path, typer.Argument(help="of the other; differs in trainer only")],
    checkpoint: Annotated[Path, typer.Option(help="initial Hugging Face folder of both")],
    out: Annotated[Path, typer.Option(help="where the figures go (JSON)")],
) -> None:
    """Three optimiser steps of two trainers on one batch: the same update?"""
    result = conformance(load_run_config(config_a), load_run_config(config_b), checkpoint)
    out.write_text(json.dumps(result, indent=2) + "\n")
    typer.echo("passed" if result["passed"] else f"FAILED: {result['detail']}")


if __name__ == "__main__":
    typer.run(main)
