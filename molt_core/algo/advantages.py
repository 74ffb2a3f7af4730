"""Advantage estimators: pure functions from the rollouts of a batch to an advantage for each sampled token.

Everything is flat over sampled tokens: ``rollout[n]`` says which rollout token n belongs to, a rollout's tokens are contiguous
and in the order of its segments. A rollout has one reward and one weight however many segments it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from molt_core.algo.config import AlgorithmConfig
from molt_core.algo.kl import k1
from molt_core.algo.registry import Registry
from molt_core.types import LARGEST_REWARD, Batch


@dataclass(frozen=True)
class RolloutTokens:
    """R rollouts with N sampled tokens. reward ``[R]`` float64, group ``[R]`` int64, rollout ``[N]`` int64 ascending,
    behaviour_logprobs ``[N]`` float32; of a reference policy, a teacher and a critic, each ``[N]`` float32 or None without one:
    reference_logprobs, teacher_logprobs, values (the return that the critic expects before the token); policy_logprobs ``[N]``
    of the policy that is about to be stepped, None unless it is one of ``AlgorithmConfig.scored_policies``."""

    reward: torch.Tensor
    group: torch.Tensor
    rollout: torch.Tensor
    behaviour_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    policy_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None


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
    centred, count = _centred(tokens.reward, tokens.group)
    variance = torch.bincount(tokens.group, centred**2)[tokens.group] / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + 1e-9))[tokens.rollout].float()


@register_advantage("dr_grpo")
def dr_grpo(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``R_i - mean_G R``: GRPO without the division by the standard deviation, which favours prompts of little variance.

    Liu et al. 2025 (arXiv 2503.20783), section 3.2 (unnumbered); its constant in place of lengths is ``aggregation: constant``.
    A group of one sample has advantage 0.
    """
    return _centred(tokens.reward, tokens.group)[0][tokens.rollout].float()


@register_advantage("rloo")
def rloo(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``R_i`` minus the mean reward of the other samples of its group, which is ``n / (n - 1) (R_i - mean_G R)``.

    REINFORCE leave-one-out: Kool et al. 2019 ("Buy 4 REINFORCE Samples, Get a Baseline for Free!"), Ahmadian et al. 2024
    (arXiv 2402.14740). A sample alone in its group has nothing to be compared with: its advantage is 0.
    """
    centred, count = _centred(tokens.reward, tokens.group)
    return (centred * count / (count - 1).clamp(min=1))[tokens.rollout].float()


@register_advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``R_i - mean_G R`` for every token of rollout i, whitened over all sampled tokens of the batch.

    REINFORCE++ with baseline: Hu et al. 2025 (arXiv 2501.03262v2), appendix A, normalised by its equation 10. A group of one
    sample enters as 0, before the whitening.
    """
    return _whitened(_centred(tokens.reward, tokens.group)[0][tokens.rollout]).float()


@register_advantage("flash_reinforce")
def flash_reinforce(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``R_i - mean R`` over the rollouts of the whole batch, one weight each: works with one sample a prompt, has no critic.

    REINFORCE with a baseline, Williams 1992 (doi 10.1007/BF00992696). Equal rewards give advantage 0, exactly. The baseline
    knows nothing of the prompt: hard prompts are pushed down and easy ones up until many batches have averaged that out.
    """
    return _centred(tokens.reward, torch.zeros_like(tokens.group))[0][tokens.rollout].float()


@register_advantage("reinforce_pp")
def reinforce_pp(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """REINFORCE++: discounted return of a token-level reward, whitened over all sampled tokens of the batch.

    ``r_t = -kl.coef (log pi - log pi_ref)_t + R [t last]``, ``G_t = r_t + gamma G_{t+1}``, ``A = (G - mean) / std``
    (biased std, variance not below 1e-8). Hu et al. 2025 (arXiv 2501.03262v2), equations 8 to 10, there without discount. pi
    is the policy that is stepped (see ``kl``). t counts sampled tokens only, over all segments: a tool's answer is not a step.
    Raises ValueError for a KL coefficient without a reference policy.
    """
    rewards = _token_rewards(tokens, config)
    return _whitened(discounted_returns(rewards, tokens.rollout, config.gamma)).float()


@register_advantage("gae")
def gae(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """Generalised advantage estimation: ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma gae_lambda A_{t+1}``.

    Schulman et al. 2016 (arXiv 1506.02438), equations 11 and 16; token rewards as in REINFORCE++. t counts sampled tokens
    only, over all segments: what stands between two of them is part of the second one's state. Not whitened. The value after
    the last token is 0, also of a rollout that was cut off at a limit: its reward is all that it earns, and a critic's guess
    at what it might have earned would pay for not coming to an end. Raises ValueError without a critic's values.
    """
    if tokens.values is None:
        raise ValueError("algorithm.advantage: gae needs a critic and there is none")
    values = tokens.values.double()
    following = torch.where(_is_last(tokens.rollout), 0.0, values.roll(-1))
    deltas = _token_rewards(tokens, config) + config.gamma * following - values
    return discounted_returns(deltas, tokens.rollout, config.gamma * config.gae_lambda).float()


def lambda_returns(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """What a critic is trained towards, ``[N]``: ``V_t`` plus the advantage by ``gae``, whatever an estimator makes of values.

    The TD(lambda) return; with ``gae_lambda: 1`` the discounted sum of the rewards to come, as in Schulman et al. 2016
    (arXiv 1506.02438), section 5. Raises ValueError without a critic's values.
    """
    return gae(tokens, config) + tokens.values


@register_advantage("on_policy_distillation")
def on_policy_distillation(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``log pi_teacher - log pi`` token by token: the reverse KL to a teacher as an immediate reward; the task's is not used.

    Agarwal et al. 2024 (arXiv 2306.13649), reverse KL on the student's own samples, by the score-function estimator; k1 is
    the exact one as a reward, and pi is the policy that is stepped (see ``kl``). Raises ValueError without a teacher.
    """
    if tokens.teacher_logprobs is None:
        raise ValueError(
            "algorithm.advantage: on_policy_distillation needs a teacher and there is none"
        )
    return -_divergence(tokens, tokens.teacher_logprobs)


def _centred(reward: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward minus its group's mean, and the group's size, both ``[R]`` float64."""
    count = torch.bincount(group).double()
    lowest = torch.full_like(count, torch.inf).scatter_reduce(0, group, reward, "amin")
    # Seen from the group's lowest reward, equal rewards are zeros whatever their size, and so is what rounding could add.
    above = reward - lowest[group]
    return above - (torch.bincount(group, above) / count)[group], count[group]


def _whitened(values: torch.Tensor) -> torch.Tensor:
    """``(x - mean) / std`` over all tokens; biased std, variance not below 1e-8."""
    deviation = values - values.mean()
    return deviation / deviation.square().mean().clamp(min=1e-8).sqrt()


def _is_last(rollout: torch.Tensor) -> torch.Tensor:
    last = torch.ones(len(rollout), dtype=torch.bool)
    last[:-1] = rollout[1:] != rollout[:-1]
    return last


def _token_rewards(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``-kl.coef (log pi - log pi_ref)_t + R [t last]``, ``[N]`` float64. Raises ValueError without a reference it needs."""
    rewards = torch.where(_is_last(tokens.rollout), tokens.reward[tokens.rollout], 0.0)
    if config.kl.coef and config.kl.place == "reward":
        if tokens.reference_logprobs is None:
            raise ValueError(
                "algorithm.kl needs a reference policy's log-probabilities and there are none"
            )
        rewards -= config.kl.coef * _divergence(tokens, tokens.reference_logprobs)
    return rewards


def _divergence(tokens: RolloutTokens, base: torch.Tensor) -> torch.Tensor:
    """``log pi - log base`` of the policy that is stepped, whichever sampled the tokens, ``[N]``."""
    if tokens.policy_logprobs is None:
        raise ValueError("a divergence as a reward needs the stepped policy's log-probabilities")
    return k1(tokens.policy_logprobs, base)


def discounted_returns(rewards: torch.Tensor, rollout: torch.Tensor, gamma: float) -> torch.Tensor:
    """``G_t = r_t + gamma G_{t+1}`` inside each rollout, ``[N]``.

    Each pass doubles how many rewards a return reaches: ``reach`` of them at first, then those of the token ``reach`` further.
    """
    returns, reach = rewards.clone(), 1
    while bool((inside := rollout[reach:] == rollout[:-reach]).any()):
        returns[:-reach] += torch.where(inside, gamma**reach * returns[reach:], 0.0)
        reach *= 2
    return returns


def rollout_tokens(
    batch: Batch,
    logprobs: Mapping[str, np.ndarray] | None = None,
    values: np.ndarray | None = None,
) -> RolloutTokens:
    """The batch, flat: groups, rollouts and segments in their order.

    logprobs: ``[N]`` of "reference", "teacher" and "policy" each; values: ``[N]`` of a critic.
    """
    by_name = {f"{name}_logprobs": torch.from_numpy(v) for name, v in (logprobs or {}).items()}
    rollouts = batch.rollouts
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    sampled = np.concatenate([segment.action_mask for segment in segments])
    behaviour = np.concatenate([segment.logprobs for segment in segments])[sampled]
    return RolloutTokens(
        reward=torch.from_numpy(np.array([r.reward for r in rollouts], np.float64)),
        group=_labels([len(group.rollouts) for group in batch.groups]),
        rollout=_labels([rollout.action_tokens for rollout in rollouts]),
        behaviour_logprobs=torch.from_numpy(behaviour),
        **by_name,
        values=None if values is None else torch.from_numpy(values),
    )


def _labels(counts: Sequence[int]) -> torch.Tensor:
    """0 ``counts[0]`` times, 1 ``counts[1]`` times, ..."""
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def advantages(tokens: RolloutTokens, config: AlgorithmConfig) -> torch.Tensor:
    """``[N]`` float32 by the estimator of ``config``.

    Raises ValueError for a reward that is no number or over ``LARGEST_REWARD``, and unless the estimator gave one finite number
    for each sampled token.
    """
    largest = float(tokens.reward.abs().max())
    if not largest <= LARGEST_REWARD:
        raise ValueError(
            f"a reward of the batch is {largest}: an agent's reward is a number of at most {LARGEST_REWARD:g} in size"
        )
    flat = advantage_function(config.advantage)(tokens, config)
    if flat.shape != tokens.rollout.shape or not bool(torch.isfinite(flat).all()):
        raise ValueError(
            f"algorithm.advantage: {config.advantage} returned shape {tuple(flat.shape)}, "
            f"{int((~torch.isfinite(flat)).sum())} values not finite; one finite number is due for each of "
            f"{len(tokens.rollout)} sampled tokens (rewards between {tokens.reward.min()} and {tokens.reward.max()})"
        )
    return flat.float()
