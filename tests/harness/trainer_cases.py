"""A checkpoint, rows and a reference trainer that make a wrong mapping show; shared by the trainer tests and their workers."""

from __future__ import annotations

import contextlib
import json
import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from molt_core.config import ModelConfig, OptimizerConfig, TrainerConfig
from molt_core.models.layout import decoder_of, vision_of
from molt_core.models.load import load_policy, save_policy
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.train.backend import TrainBackend
from molt_core.train.collate import MicroBatch, collate, mrope_positions
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.split import filler_row, split_rows
from molt_core.train.state import SavedState
from molt_core.train.weights import whole_weights
from molt_core.types import ImageInput, Trajectory, Turn

MODEL = ModelConfig(builtin="tiny-qwen3-vl-moe")
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=1.0, clip_norm=1.0)
STEPS = 3
SLICE_BYTES = 10_000
"""Of weights as they are collected: less than an expert in some, several experts in others."""


def rescaled_checkpoint(
    folder: Path, build: Callable[[Path], Path] = build_tiny_qwen3_vl_moe
) -> Path:
    """A tiny policy with large weights, no two alike: nothing cancels, nothing is one, routers are decided."""
    source = build(folder / "initial")
    policy = load_policy(source)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.25 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_((0.1 if "visual" in name else 0.15) * noise)
    return save_policy(policy, source, folder / "rescaled")


def trajectories(checkpoint: Path, images_per_row: tuple[int, ...]) -> list[Trajectory]:
    """One row an entry, of its own length, with that many images of different grids, and 3 to 6 actions at its end.

    At the end a second sample of the row with the most images, which shares them.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    rng = np.random.default_rng(5)
    vision = config.get("vision_config", {"temporal_patch_size": 0, "patch_size": 0})
    width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    grids = [(1, 4, 4), (1, 4, 6), (1, 8, 4)]
    rows = []
    for number, count in enumerate(images_per_row):
        ids = list(rng.integers(0, 256, 2 + number % 3))
        images = []
        for _ in range(count):
            grid = grids[rng.integers(len(grids))]
            length = grid[1] * grid[2] // 4
            ids.append(config["vision_start_token_id"])
            patches = rng.standard_normal((grid[1] * grid[2], width)).astype(np.float32)
            pixels = np.zeros((grid[1] * 8, grid[2] * 8, 3), np.uint8)
            images.append(ImageInput(pixels, patches, grid, len(ids), length))
            ids += [config["image_token_id"]] * length + [config["vision_end_token_id"]]
            ids += list(rng.integers(0, 256, 2))
        prompt, actions = len(ids), 3 + number % 4
        ids += list(rng.integers(0, 256, actions))
        mask = np.arange(len(ids)) >= prompt
        rows.append(
            Trajectory(
                token_ids=np.array(ids, np.int32),
                prompt_length=prompt,
                action_mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                mixed=np.zeros(len(ids), bool),
                turns=(Turn(prompt, len(ids), {}, 0, "stop"),),
                images=tuple(images),
            )
        )
    return [*rows, another_sample(rows[int(np.argmax(images_per_row))])]


def advantages(rows: list[Trajectory]) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.standard_normal(row.action_tokens).astype(np.float32) for row in rows]


def another_sample(row: Trajectory) -> Trajectory:
    """A second sample of the row's prompt: the same image objects, other actions."""
    ids = np.where(row.action_mask, row.token_ids[::-1] % 256, row.token_ids)
    return replace(row, token_ids=ids.astype(np.int32))


def with_random_records(rows: list[Trajectory]) -> list[Trajectory]:
    """The rows with a record of two experts a token and layer that no router would choose; every fifth token has none."""
    rng = np.random.default_rng(7)
    recorded = []
    for row in rows:
        scores = rng.standard_normal((len(row.token_ids), 2, 8))
        record = scores.argsort(-1)[..., :2].astype(np.int16)
        record[::5] = -1
        recorded.append(replace(row, routed_experts=record))
    return recorded


@contextlib.contextmanager
def replayed(policy: torch.nn.Module, rows: list[Trajectory]) -> Iterator[None]:
    """Inside, transformers' routers send the tokens of the left-padded ``rows`` where their records say, if they have any.

    The textbook way: softmax over all experts, the recorded ones picked, their weights divided by their sum.
    """
    if rows[0].routed_experts is None:
        yield
        return
    length = max(len(row.token_ids) for row in rows)
    record = np.full((len(rows), length, *rows[0].routed_experts.shape[1:]), -1)
    for number, row in enumerate(rows):
        record[number, length - len(row.token_ids) :] = row.routed_experts
    flat = torch.from_numpy(record.astype(np.int64)).flatten(0, 1)

    def hook(layer: int):
        def replace_choice(module, inputs, outputs):
            logits, _, natural = outputs
            chosen = torch.where(flat[:, layer, :1] >= 0, flat[:, layer], natural)
            picked = logits.softmax(-1).gather(1, chosen)
            return logits, picked / picked.sum(-1, keepdim=True), chosen

        return replace_choice

    layers = decoder_of(policy).layers
    hooks = [
        layer.mlp.gate.register_forward_hook(hook(number)) for number, layer in enumerate(layers)
    ]
    yield
    for handle in hooks:
        handle.remove()


def oracle_logits(
    policy: torch.nn.Module, rows: list[Trajectory], stretch: int | None = None
) -> torch.Tensor:
    """Logits ``[N, vocabulary]`` at the predicting positions by transformers alone, from rows padded on the left.

    It gets every row's images and finds their places and all positions by itself, unless positions are multiplied by
    ``stretch``; rows with a record of routing are routed by it.
    """
    length = max(len(row.token_ids) for row in rows)
    token_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    position_ids = torch.zeros(3, len(rows), length, dtype=torch.long)
    action = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        own = slice(length - len(row.token_ids), length)
        token_ids[number, own] = torch.from_numpy(row.token_ids.astype(np.int64))
        action[number, own] = torch.from_numpy(row.action_mask)
        mask[number, own] = 1
        position_ids[:, number, own] = torch.from_numpy(
            mrope_positions(len(row.token_ids), row.images, merge_size=2)
        )
    inputs = dict(
        input_ids=token_ids,
        attention_mask=mask,
        position_ids=None if stretch is None else position_ids * stretch,
    )
    if vision_of(policy) is not None:
        inputs["mm_token_type_ids"] = (token_ids == policy.config.image_token_id).int()
    images = [image for row in rows for image in row.images]
    if images:
        inputs.update(
            pixel_values=torch.from_numpy(np.concatenate([image.patches for image in images])),
            image_grid_thw=torch.tensor([image.grid_thw for image in images]),
        )
    with replayed(policy, rows):
        logits = policy(**inputs, use_cache=False).logits
    return logits[:, :-1][action[:, 1:]]


PLAIN = ActionDistribution(temperature=1.0, excluded_ids=torch.tensor([], dtype=torch.long))
"""The softmax as it is."""


@torch.no_grad()
def backend_logprobs(backend: TrainBackend, batch: MicroBatch) -> torch.Tensor:
    return backend.action_logprobs(batch, PLAIN)[0]


def kept_bytes(backend: TrainBackend, batch: MicroBatch) -> int:
    """Bytes that one forward pass keeps for its backward pass, each storage once, parameters included."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = backend.action_logprobs(batch, PLAIN)
    backend.backward(logprobs.sum(), is_last=True)
    return sum(kept.values())


def token_logprobs(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, batch.action_ids[:, None]).squeeze(1)


def policy_gradient_loss(
    logprobs: torch.Tensor, batch: MicroBatch, denominator: int
) -> torch.Tensor:
    return -(logprobs * batch.advantages).sum() / denominator


class Training(NamedTuple):
    """What ``STEPS`` steps of one trainer gave: a loss and a gradient norm each; weights and relative size of the last.

    before_last: what was to be saved before the last step (``saved_form``); the oracle's only.
    """

    norms: list[float]
    weights: dict[str, torch.Tensor]
    losses: list[float]
    update_ratio: float
    before_last: dict[str, dict[str, torch.Tensor]] | None = None


def oracle_training(checkpoint: Path, rows: list[Trajectory]) -> Training:
    """Transformers, clip_grad_norm_ and AdamW, decay on matrices only."""
    policy = load_policy(checkpoint)
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 1.0},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    batch = collate(rows, advantages(rows))
    norms, losses = [], []
    for _ in range(STEPS):
        before_last = saved_form(policy, optimizer)
        logprobs = token_logprobs(oracle_logits(policy, rows), batch)
        loss = policy_gradient_loss(logprobs, batch, len(batch.action_ids))
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.clip_norm)))
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.step()
        optimizer.zero_grad()
    added = torch.cat([(p - b).flatten() for p, b in zip(parameters, before)]).norm()
    ratio = added / torch.cat([parameter.flatten() for parameter in parameters]).norm()
    weights = {name: p.detach() for name, p in policy.named_parameters()}
    return Training(norms, weights, losses, float(ratio), before_last)


def saved_form(policy: torch.nn.Module, optimizer: torch.optim.AdamW) -> dict[str, dict]:
    """A copy of weights and moments as every backend saves them, made without any of them."""
    zero = torch.zeros(())
    moments = {name: optimizer.state.get(p, {}) for name, p in policy.named_parameters()}
    return {
        "weights": {name: p.detach().clone() for name, p in policy.named_parameters()},
        "first_moments": {n: held.get("exp_avg", zero).clone() for n, held in moments.items()},
        "second_moments": {n: held.get("exp_avg_sq", zero).clone() for n, held in moments.items()},
    }


def share(rows: list[Trajectory], data_rank: int, data_size: int, trainer: TrainerConfig):
    """This rank's micro-batches as ``trainer`` cuts them: (rows, advantages)."""
    values = advantages(rows)
    nothing = ([filler_row(rows[0])], [values[0][:0]])
    return [
        ([rows[i] for i in part], [values[i] for i in part]) if part else nothing
        for part in split_rows(rows, data_size, trainer)[data_rank]
    ]


def backend_step(
    backend: TrainBackend,
    micro_batches: list[tuple[list[Trajectory], list[np.ndarray]]],
    denominator: int,
    factor: float = 1.0,
    apply: bool = True,
) -> float:
    """One optimiser step on this rank's micro-batches, the loss times ``factor``; the gradient norm."""
    for number, (rows, row_advantages) in enumerate(micro_batches):
        batch = collate(rows, row_advantages)
        logprobs, _ = backend.action_logprobs(batch, PLAIN)
        loss = policy_gradient_loss(logprobs, batch, denominator)
        backend.backward(factor * loss, is_last=number == len(micro_batches) - 1)
    return backend.optimizer_step(apply)


def disturbed_training(
    backend: TrainBackend, micro_batches, denominator: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """``backend_training`` with three steps before each that must not be taken; all gradient norms."""
    norms = []
    for _ in range(STEPS):
        for factor, apply in ((math.nan, True), (0.0, True), (3.0, False), (1.0, True)):
            norms.append(backend_step(backend, micro_batches, denominator, factor, apply))
    return norms, given_out(backend)


def backend_training(
    backend: TrainBackend, micro_batches, denominator: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    norms = [backend_step(backend, micro_batches, denominator) for _ in range(STEPS)]
    return norms, given_out(backend)


def given_out(
    backend: TrainBackend, leave_out: frozenset[str] = frozenset()
) -> dict[str, torch.Tensor]:
    """The weights as rank 0 gets them, most of them in slices; the same on every rank."""
    found = [dict(whole_weights(backend.weights(leave_out), SLICE_BYTES))]
    dist.broadcast_object_list(found)
    return found[0]


def largest_difference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dimensions: int | None = None
) -> float:
    """Largest |difference| over the tensors, or over those of ``dimensions`` dimensions (2 stands for two or more)."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).abs().max())
        for name in expected
        if dimensions is None or min(expected[name].dim(), 2) == dimensions
    )


def assert_saved_form(folder: Path, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    """The saved state in ``folder`` holds ``STEPS - 1`` steps and, to rounding, the tensors of ``expected``."""
    saved = SavedState(folder)
    assert saved.steps == STEPS - 1
    assert saved.names == sorted(expected["weights"])
    for kind, tensors in expected.items():
        for name, tensor in tensors.items():
            largest = float(tensor.abs().max())
            difference = float((saved.tensor(kind, name) - tensor).abs().max())
            assert difference <= 1e-5 + 1e-4 * largest, (kind, name, difference, largest)


def save_form(form: dict[str, dict[str, torch.Tensor]], folder: Path) -> Path:
    """Write ``form`` as a backend would, with ``STEPS - 1`` steps, by torch alone."""
    dcp.save({**form, "steps": STEPS - 1}, checkpoint_id=folder, no_dist=True)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
