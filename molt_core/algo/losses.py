"""Policy losses: pure functions from sampled tokens to a loss each. No padding, no mask: only sampled tokens come here.

A loss returns its value a token and indicators a token (averaged over tokens into metrics of the same name). The weights of
the tokens in the global batch, the importance correction and backward are the trainer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from molt_core.algo.config import AlgorithmConfig
from molt_core.algo.registry import Registry

LOG_RATIO_BOUND = 30.0
"""Log ratios are clamped to +-30 before exponentiation: e^30 is finite in float32 and far beyond any clip."""


@dataclass(frozen=True)
class LossTokens:
    """N sampled tokens. logprobs ``[N]`` with gradient; proximal_logprobs, behaviour_logprobs, advantages ``[N]`` without;
    sequence ``[N]`` int64, which rollout a token belongs to: the tokens of all its segments are here, or none of them."""

    logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    sequence: torch.Tensor


Loss = Callable[[LossTokens, AlgorithmConfig], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
_LOSSES: Registry[Loss] = Registry("algorithm.loss")
register_loss = _LOSSES.register
loss_function = _LOSSES.__getitem__


def log_ratio(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """logprobs - base, clamped to +-``LOG_RATIO_BOUND``."""
    return (logprobs - base).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """exp of ``log_ratio``."""
    return log_ratio(logprobs, base).exp()


def sequence_sum(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """For each token the sum of ``values`` over the tokens of its sequence, ``[N]``."""
    return _by_sequence(values, sequence)[0][sequence]


def sequence_mean(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """For each token the mean of ``values`` over the tokens of its sequence, ``[N]``."""
    sums, counts = _by_sequence(values, sequence)
    return (sums / counts)[sequence]


def _by_sequence(values: torch.Tensor, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each sequence the sum of its ``values``, and how many they are."""
    counts = sequence.bincount()
    return values.new_zeros(len(counts)).index_add(0, sequence, values), counts


@register_loss("clipped")
def clipped(
    tokens: LossTokens, config: AlgorithmConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """PPO's clipped surrogate, with the asymmetric clip of DAPO and, where ``dual_clip`` c is set, the dual clip.

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, r = policy over proximal policy; for A < 0 not above ``-c A``.
    Schulman et al. 2017 (arXiv 1707.06347), equation 7; asymmetric bounds: Yu et al. 2025 (arXiv 2503.14476v2), equation 8;
    dual clip: Ye et al. 2020 (arXiv 1912.09729), equation 5.
    """
    loss, metrics = _clipped_surrogate(
        ratio(tokens.logprobs, tokens.proximal_logprobs), tokens, config
    )
    if config.dual_clip is None:
        return loss, metrics
    ceiling = torch.where(tokens.advantages < 0, -config.dual_clip * tokens.advantages, torch.inf)
    return torch.minimum(loss, ceiling), {**metrics, "dual_clip_fraction": loss > ceiling}


@register_loss("gspo")
def gspo(
    tokens: LossTokens, config: AlgorithmConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The clipped surrogate of one ratio a rollout, ``s = exp(mean_t log r_t)``, the geometric mean of its token ratios.

    ``-min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)`` with ``s_t = sg[s] pi_t / sg[pi_t]``: the paper's GSPO-token,
    whose values are those of GSPO and whose gradient is too where all tokens of a rollout have one advantage. Otherwise each
    token keeps its own advantage and importance weight, and one that a correction rejects is not trained. The mean runs over
    all segments. Zheng et al. 2025 (arXiv 2507.18071v2), equations 7 (s), 13 and 14 (GSPO-token); with ``aggregation:
    sequence_mean`` the sum over tokens is equation 13 itself.
    """
    logs = log_ratio(tokens.logprobs, tokens.proximal_logprobs)
    s = sequence_mean(logs.detach(), tokens.sequence).exp()
    own = ratio(tokens.logprobs, tokens.logprobs.detach())
    return _clipped_surrogate(s * own, tokens, config)


def _clipped_surrogate(
    r: torch.Tensor, tokens: LossTokens, config: AlgorithmConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    plain = r * tokens.advantages
    bounded = r.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantages
    outside = bounded < plain
    return -torch.minimum(plain, bounded), {
        "clip_fraction": outside,
        "clip_fraction_low": outside & (tokens.advantages < 0),
    }


@register_loss("cispo")
def cispo(
    tokens: LossTokens, config: AlgorithmConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The policy gradient under a bounded importance weight: no token's gradient is cut off.

    ``-min(r, 1 + clip_high) A log pi``, the weight without gradient. MiniMax 2025 (arXiv 2506.13585), equations 4 and 5,
    without a lower bound as in the runs of that paper: ``clip_low`` is not used.
    """
    r = ratio(tokens.logprobs.detach(), tokens.proximal_logprobs)
    bound = 1 + config.clip_high
    return -r.clamp(max=bound) * tokens.advantages * tokens.logprobs, {"clip_fraction": r > bound}


@register_loss("policy_gradient")
def policy_gradient(
    tokens: LossTokens, config: AlgorithmConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """``-A log pi``. Williams 1992 (doi 10.1007/BF00992696), REINFORCE. No ratio: off-policy data is the correction's part."""
    return -tokens.advantages * tokens.logprobs, {}


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """``max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2) / 2``, ``[N]``, for a critic; G is advantage plus V_old.

    The value clipping of PPO's reference code, as Engstrom et al. 2020 (arXiv 2005.12729), section 3, describe it: the larger
    of both errors, so that a value which moved further than ``clip`` is only ever pulled back.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    loss = torch.maximum((values - returns).square(), (near - returns).square()) / 2
    return loss, {"value_clip_fraction": (values - old_values).abs() > clip}


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """``1 - Var(G - V) / Var(G)`` over tokens: 1 for a perfect critic, 0 for one that knows a constant; None where G has none.

    A constant error is not seen in it.
    """
    if not len(returns):
        return None
    spread = returns.double().var(correction=0)
    if spread == 0:
        return None
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread)
