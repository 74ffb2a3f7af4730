"""Small valid objects of the data contract, for tests."""

import numpy as np
import torch

from molt_core.algo.aggregation import WeightedRollout
from molt_core.train.weights import Part, Weight
from molt_core.types import NOT_SAMPLED, Group, ImageInput, Rollout, Trajectory, Turn


def trajectory(
    prompt: int = 4,
    actions: int = 3,
    version: int = 0,
    logprob: float = -1.0,
    images: tuple[ImageInput, ...] = (),
    token_ids: np.ndarray | None = None,
) -> Trajectory:
    length = prompt + actions
    sampled = np.arange(length) >= prompt
    return Trajectory(
        token_ids=np.arange(length, dtype=np.int32) if token_ids is None else token_ids,
        prompt_length=prompt,
        action_mask=sampled,
        logprobs=np.where(sampled, np.float32(logprob), np.float32(0)).astype(np.float32),
        versions=np.where(sampled, version, NOT_SAMPLED).astype(np.int32),
        mixed=np.zeros(length, bool),
        turns=(Turn(prompt, length, {}, 0, "stop"),) if actions else (),
        images=images,
    )


def weighted(actions: int = 3, segments: int = 1) -> WeightedRollout:
    """A rollout to train on: advantages 1, every token weighs the same."""
    parts = tuple(trajectory(actions=actions) for _ in range(segments))
    count = actions * segments
    return WeightedRollout(parts, np.ones(count, np.float32), np.full(count, 1 / count, np.float32))


def group(
    index: int,
    rewards: tuple[float, ...] = (0.0, 1.0),
    version: int = 0,
    status: str = "ok",
    prompt_id: str | None = None,
) -> Group:
    rollouts = tuple(
        Rollout(
            f"{index}/{n}", (trajectory(actions=3 + index % 3, version=version),), reward, status
        )
        for n, reward in enumerate(rewards)
    )
    generated = sum(rollout.action_tokens for rollout in rollouts)
    return Group(prompt_id or f"p{index}", index, rollouts, generated, version)


def weight(name: str, tensor: torch.Tensor) -> Weight:
    """A weight that lies whole on rank 0."""

    def parts(start: int, stop: int) -> list[Part]:
        return [Part(0, (), lambda: tensor[start:stop])]

    return Weight(name, tuple(tensor.shape), tensor.dtype, tensor.device, parts)
