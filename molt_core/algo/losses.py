"""Policy losses: pure functions from sampled tokens to a loss each. No padding, no mask: only sampled tokens come here.

A loss returns its value a token and indicators a token (averaged over tokens into metrics of the same name). The sum over the
global batch divided by one denominator, the importance correction and backward are the trainer's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from molt_core.algo.registry import Registry
from molt_core.config import AlgorithmConfig

LOG_RATIO_BOUND = 30.0
"""Log ratios are clamped to +-30 before exponentiation: e^30 is finite in float32 and far beyond any clip."""


@dataclass(frozen=True)
class LossTokens:
    """N sampled tokens. logprobs ``[N]`` with gradient; proximal_logprobs, behaviour_logprobs, advantages ``[N]`` without."""

    logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor


Loss = Callable[[LossTokens, AlgorithmConfig], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
_LOSSES: Registry[Loss] = Registry("algorithm.loss")
register_loss = _LOSSES.register
loss_function = _LOSSES.__getitem__


def ratio(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - base), the log ratio clamped to +-``LOG_RATIO_BOUND``."""
    return (logprobs - base).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@register_loss("clipped")
def clipped(
    tokens: LossTokens, config: AlgorithmConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """PPO's clipped surrogate, with the asymmetric clip of DAPO.

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, r = policy over proximal policy. Schulman et al. 2017
    (arXiv 1707.06347), equation 7; asymmetric bounds: Yu et al. 2025 (arXiv 2503.14476), equation 10.
    """
    r = ratio(tokens.logprobs, tokens.proximal_logprobs)
    plain = r * tokens.advantages
    bounded = r.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantages
    return -torch.minimum(plain, bounded), {"clipped": bounded < plain}
