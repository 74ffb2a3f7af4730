"""What each sampled token weighs in the objective, and the batch as the trainer receives it.

The objective is ``sum_t weight_t * correction_t * loss_t`` over all sampled tokens of the batch. The weights are made once,
from the whole batch, before it is split over ranks and micro-batches: a sum does not depend on how it is split, so neither
does the objective, and nothing after this file knows a denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np
import torch

from molt_core.algo.advantages import RolloutTokens, advantages, lambda_returns, rollout_tokens
from molt_core.algo.config import AlgorithmConfig
from molt_core.types import Batch, Trajectory


class WeightedRollout(NamedTuple):
    """A rollout to train on, the unit that is never split: its segments lie in one micro-batch.

    ``[n]`` float32 each, over the sampled tokens of all segments in their order: advantages, weights; with a reference policy
    reference_logprobs; with a critic values, its own before its step, and returns, what it is trained towards.
    """

    segments: tuple[Trajectory, ...]
    advantages: np.ndarray
    weights: np.ndarray
    reference_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None

    @property
    def action_tokens(self) -> int:
        return sum(segment.action_tokens for segment in self.segments)

    @property
    def tokens_forward(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)


def token_mean(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """Every sampled token alike: ``1 / N``. DAPO, Yu et al. 2025 (arXiv 2503.14476v2), equation 12, of a whole batch."""
    count = len(tokens.rollout)
    return torch.full((count,), 1 / max(1, count), dtype=torch.float64)


def sequence_mean(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """The mean over rollouts of the mean over a rollout's tokens. Shao et al. 2024 (arXiv 2402.03300), equation 3.

    A token of a rollout of n tokens, one of S rollouts that have any, weighs ``1 / (n S)``: less in a longer rollout.
    """
    return _mean_of_means(tokens.rollout)


def prompt_mean(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """The mean over prompts of the mean over all tokens of a prompt's rollouts: ``1 / (n P)``, n tokens in the group, P groups.

    DAPO, Yu et al. 2025 (arXiv 2503.14476v2), equation 8, read as it stands: an expectation over prompts.
    """
    return _mean_of_means(tokens.group[tokens.rollout])


def constant(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """The sum over a rollout's tokens over a fixed length L, averaged over S rollouts that have any: ``1 / (L S)``.

    Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section 3.2; L is ``aggregation_length``.
    """
    weight = 1 / (config.aggregation_length * max(1, len(tokens.rollout.unique())))
    return torch.full((len(tokens.rollout),), weight, dtype=torch.float64)


def _mean_of_means(label: torch.Tensor) -> torch.Tensor:
    _, place, counts = label.unique(return_inverse=True, return_counts=True)
    return 1 / (counts[place].double() * len(counts))


AGGREGATIONS: dict[str, Callable[[RolloutTokens, AlgorithmConfig], torch.Tensor]] = {
    function.__name__: function for function in (token_mean, sequence_mean, prompt_mean, constant)
}
"""By ``algorithm.aggregation``."""


def weighted_rollouts(
    batch: Batch,
    config: AlgorithmConfig,
    logprobs: Mapping[str, np.ndarray] | None = None,
    values: np.ndarray | None = None,
) -> list[WeightedRollout]:
    """The rollouts of ``batch`` that have segments, in order.

    Of the batch's sampled tokens, ``[N]``: logprobs, by each of ``config.scored_policies``; values, a critic's. Raises
    ValueError where the estimator's result is not one finite number a token.
    """
    tokens = rollout_tokens(batch, logprobs, values)
    columns = (
        advantages(tokens, config),
        AGGREGATIONS[config.aggregation](tokens, config),
        tokens.reference_logprobs,
        tokens.values,
        None if tokens.values is None else lambda_returns(tokens, config),
    )
    rollouts = [rollout for rollout in batch.rollouts if rollout.segments]
    edges = list(accumulate([rollout.action_tokens for rollout in rollouts], initial=0))
    spans = list(map(slice, edges, edges[1:]))
    cut = [
        repeat(None) if c is None else map(c.float().numpy().__getitem__, spans) for c in columns
    ]
    return list(map(WeightedRollout, [rollout.segments for rollout in rollouts], *cut))
