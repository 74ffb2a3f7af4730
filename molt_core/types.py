"""The data contract: what a sampled token carries from the engine to the gradient.

A *trajectory* is token ids, never text. Each id knows whether this policy sampled it (``action_mask``), under which
log-probability (``logprobs``) and at which policy version (``versions``). Everything downstream (filters, advantages,
losses, books) reads these arrays; nothing re-tokenises.

    Trajectory (one segment) -> Rollout (one episode, one reward) -> Group (all samples of one prompt) -> Batch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

NOT_SAMPLED = -1
"""Version of a token that the policy did not sample, and the routing entry of a position without a record."""

LARGEST_REWARD = 1e30
"""In size. Advantages are float32, and the square of a reward must not overflow in silence."""


class ContractError(ValueError):
    """A trajectory, rollout or group that breaks the data contract; the message names the field and the position."""


class NotFinite(ContractError):
    """A number that is none, met under weights of ``version``. batch: what it is of, where that was about to be trained on.

    What it means for a run: ``divergence.ended_by``.
    """

    def __init__(self, message: str, version: int = 0, **batch: Any) -> None:
        super().__init__(message)
        self.version, self.batch = version, batch


@dataclass(frozen=True)
class Item:
    """One question before rendering: chat messages with places for ``images`` (``[height, width, 3]`` uint8); its answer."""

    prompt_id: str
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[np.ndarray, ...] = ()
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image of a prompt: the pixels that the engine receives and the patches that the trainer receives.

    pixels: ``[height, width, 3]`` uint8, None once the engine has had them. patches: ``[patches, patch_dim]`` float32, as the
    model's image processor makes them. grid_thw: patch grid (time, height, width). Its placeholder tokens are
    ``token_ids[start : start + length]``.
    """

    pixels: np.ndarray | None
    patches: np.ndarray
    grid_thw: tuple[int, int, int]
    start: int
    length: int


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: ``token_ids`` after image expansion, and what the grader needs.

    ``index`` is the position in the run's dispatch order, ``prompt_id`` names the item whatever the order.
    """

    prompt_id: str
    index: int
    token_ids: tuple[int, ...]
    images: tuple[ImageInput, ...] = ()
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """How one stretch of actions was sampled: tokens ``[start, stop)``, the sampling fields sent, the request's seed."""

    start: int
    stop: int
    sampling: Mapping[str, Any]
    request_seed: int
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One segment of a rollout. All arrays run over the T token positions.

    token_ids int32; action_mask bool, True where this policy sampled the token; logprobs float32, behaviour
    log-probability of the sampled token under the distribution really sampled from, 0 where not an action; versions
    int32, policy version that sampled it, -1 where not an action; mixed bool, sampled after a refit over a KV cache of
    older weights; routed_experts ``[T, layers, k]`` int16 or None, -1 where unknown: the experts that each token went to
    when the engine first computed it.
    """

    token_ids: np.ndarray
    prompt_length: int
    action_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    mixed: np.ndarray
    turns: tuple[Turn, ...]
    images: tuple[ImageInput, ...] = ()
    routed_experts: np.ndarray | None = None

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("action_mask", "logprobs", "versions", "mixed"):
            if len(getattr(self, name)) != length:
                raise ContractError(
                    f"Trajectory.{name} has {len(getattr(self, name))} entries for {length} tokens"
                )
        if self.routed_experts is not None and len(self.routed_experts) != length:
            raise ContractError(
                f"Trajectory.routed_experts has {len(self.routed_experts)} entries for {length} tokens"
            )
        action = self.action_mask
        if not 0 < self.prompt_length <= length:
            raise ContractError(
                f"Trajectory.prompt_length {self.prompt_length} is outside 1..{length}"
            )
        if action[: self.prompt_length].any():
            raise ContractError(
                "Trajectory.action_mask is True inside the prompt: a token nobody sampled would be trained"
            )
        sampled = np.zeros(length, dtype=bool)
        for turn in self.turns:
            sampled[turn.start : turn.stop] = True
        if not np.array_equal(sampled, action):
            raise ContractError(
                "Trajectory.action_mask and the turns' spans disagree about which tokens were sampled"
            )
        if not np.isfinite(self.logprobs[action]).all():
            raise ContractError(
                "Trajectory.logprobs is not finite at an action: the engine returned no log-probability"
            )
        if (self.logprobs[action] > 1e-5).any():
            raise ContractError(
                "Trajectory.logprobs is positive at an action: not a log-probability"
            )
        if (self.logprobs[~action] != 0).any() or (self.versions[~action] != NOT_SAMPLED).any():
            raise ContractError(
                "Trajectory carries a log-probability or a version at a token that was not sampled"
            )
        if (self.versions[action] < 0).any():
            raise ContractError(
                "Trajectory.versions is missing at an action: its policy version is unknown"
            )

    @cached_property
    def action_tokens(self) -> int:
        return int(self.action_mask.sum())

    @property
    def tokens_across_refit(self) -> int:
        """Action tokens sampled under a newer policy than the trajectory's first action."""
        versions = self.versions[self.action_mask]
        return int((versions > versions[0]).sum()) if len(versions) else 0


@dataclass(frozen=True)
class Rollout:
    """One episode: one or more segments that share one reward (at most ``LARGEST_REWARD`` in size).

    ``status`` is "ok" or the reason it cannot be trained. ``truncated``: its last answer was cut off at ``max_new_tokens``, or
    its last call had no room left in the context.
    """

    rollout_id: str
    segments: tuple[Trajectory, ...]
    reward: float
    status: str = "ok"
    info: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False

    @cached_property
    def action_tokens(self) -> int:
        return sum(segment.action_tokens for segment in self.segments)


@dataclass(frozen=True)
class Group:
    """All samples of one prompt: dispatched, filtered and trained whole.

    tokens_generated is counted by the engine from its raw outputs, independently of the segments: the books compare both.
    """

    prompt_id: str
    index: int
    rollouts: tuple[Rollout, ...]
    tokens_generated: int
    dispatched_version: int

    @cached_property
    def action_tokens(self) -> int:
        return sum(rollout.action_tokens for rollout in self.rollouts)

    @property
    def rewards(self) -> np.ndarray:
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def error(self) -> str:
        """What the first of its agents that failed said; empty where none did."""
        return next((r.info["error"] for r in self.rollouts if r.status == "agent_error"), "")

    @property
    def segments(self) -> list[Trajectory]:
        return [segment for rollout in self.rollouts for segment in rollout.segments]


@dataclass(frozen=True)
class Batch:
    """The groups of one training step, in dispatch order; ``version`` is the policy that is about to be stepped."""

    groups: tuple[Group, ...]
    version: int

    @cached_property
    def action_tokens(self) -> int:
        """All action tokens of the batch, over all ranks and micro-batches: what the token mean divides by."""
        return sum(group.action_tokens for group in self.groups)

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]
