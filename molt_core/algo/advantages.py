"""Advantage estimators: pure functions from the rollouts of a batch to an advantage for each sampled token.

Everything is flat over sampled tokens: ``rollout[n]`` says which rollout token n belongs to, a rollout's tokens are contiguous
and in the order of generation over all its segments. A rollout has one reward and one weight however many segments it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from molt_core.algo.kl import k1
from molt_core.algo.registry import Registry
from molt_core.config import AlgorithmConfig
from molt_core.types import Batch


@dataclass(frozen=True)
class RolloutTokens:
    """R rollouts with N sampled tokens. reward ``[R]`` float64, group ``[R]`` int64, rollout ``[N]`` int64 ascending,
    behaviour_logprobs ``[N]`` float32, reference_logprobs ``[N]`` float32 or None without a reference policy."""

    reward: torch.Tensor
    group: torch.Tensor
    rollout: torch.Tensor
    behaviour_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None = None


Estimator = Callable[[RolloutTokens, AlgorithmConfig], torch.Tensor]
_ESTIMATORS: Registry[Estimator] = Registry("algorithm.advantage")
register_advantage = _ESTIMATORS.register
advantage_function = _ESTIMATORS.__getitem__


@register_advantage("grpo")
def grpo(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``(R_i - mean_G R) / (std_G R + 1e-9)`` for every token of rollout i, sample standard deviation (ddof 1).

    Shao et al. 2024 (arXiv 2402.03300), section 4.1.2, outcome supervision. A group of one sample, or of equal rewards, has
    advantage 0, exactly.
    """
    count = torch.bincount(tokens.group).double()
    lowest = torch.full_like(count, torch.inf).scatter_reduce(
        0, tokens.group, tokens.reward, "amin"
    )
    # Seen from the group's lowest reward, equal rewards are zeros whatever their size, and so is what rounding could add.
    above = tokens.reward - lowest[tokens.group]
    centred = above - (torch.bincount(tokens.group, above) / count)[tokens.group]
    variance = torch.bincount(tokens.group, centred**2) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + 1e-9)[tokens.group])[tokens.rollout].float()


@register_advantage("reinforce_pp")
def reinforce_pp(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """REINFORCE++: discounted return of a token-level reward, whitened over all sampled tokens of the batch.

    ``r_t = -kl_coef (log pi - log pi_ref)_t + R [t last]``, ``G_t = r_t + gamma G_{t+1}``, ``A = (G - mean) / std``
    (biased std, variance not below 1e-8). Hu 2025 (arXiv 2501.03262), section 3. t counts sampled tokens only, over all
    segments: a tool's answer is not a step. Raises ValueError for a KL coefficient without a reference policy.
    """
    rewards = torch.zeros(len(tokens.rollout), dtype=torch.float64)
    if config.kl_coef:
        if tokens.reference_logprobs is None:
            raise ValueError(
                "algorithm.kl_coef needs a reference policy and there is none; set it to 0"
            )
        rewards -= config.kl_coef * k1(tokens.behaviour_logprobs, tokens.reference_logprobs)
    last = torch.ones(len(tokens.rollout), dtype=torch.bool)
    last[:-1] = tokens.rollout[1:] != tokens.rollout[:-1]
    rewards[last] += tokens.reward[tokens.rollout[last]]
    returns = discounted_returns(rewards, tokens.rollout, config.gamma)
    deviation = returns - returns.mean()
    return (deviation / deviation.square().mean().clamp(min=1e-8).sqrt()).float()


def discounted_returns(rewards: torch.Tensor, rollout: torch.Tensor, gamma: float) -> torch.Tensor:
    """``G_t = r_t + gamma G_{t+1}`` inside each rollout, ``[N]``; one vector operation a token position, not a token."""
    _, row, lengths = torch.unique_consecutive(rollout, return_inverse=True, return_counts=True)
    column = torch.arange(len(rollout)) - (lengths.cumsum(0) - lengths)[row]
    table = rewards.new_zeros(int(lengths.max()), len(lengths))
    table[column, row] = rewards
    for t in range(len(table) - 2, -1, -1):
        table[t] += gamma * table[t + 1]
    return table[column, row]


def rollout_tokens(batch: Batch) -> RolloutTokens:
    """The batch, flat: groups, rollouts and segments in their order."""
    rollouts = batch.rollouts
    group = [g for g, members in enumerate(batch.groups) for _ in members.rollouts]
    return RolloutTokens(
        reward=torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
        group=torch.tensor(group),
        rollout=torch.repeat_interleave(torch.tensor([r.action_tokens for r in rollouts])),
        behaviour_logprobs=torch.from_numpy(
            np.concatenate([s.logprobs[s.action_mask] for r in rollouts for s in r.segments])
        ),
    )


def advantages(batch: Batch, config: AlgorithmConfig) -> list[np.ndarray]:
    """One float32 array of ``action_tokens`` values for each segment, in the order of groups, rollouts and segments.

    Raises ValueError where the estimator's result is not one finite number a sampled token.
    """
    flat = advantage_function(config.advantage)(rollout_tokens(batch), config)
    if flat.shape != (batch.action_tokens,) or not bool(torch.isfinite(flat).all()):
        raise ValueError(
            f"algorithm.advantage: {config.advantage} returned shape {tuple(flat.shape)}, "
            f"{int((~torch.isfinite(flat)).sum())} values not finite; one finite number is due for each of "
            f"{batch.action_tokens} sampled tokens (rewards between {min(r.reward for r in batch.rollouts)} and "
            f"{max(r.reward for r in batch.rollouts)})"
        )
    lengths = [segment.action_tokens for rollout in batch.rollouts for segment in rollout.segments]
    return np.split(flat.float().numpy(), np.cumsum(lengths)[:-1])
