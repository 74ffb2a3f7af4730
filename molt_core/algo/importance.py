"""Importance correction for the difference between the policy that sampled a token and the one about to be trained.

The difference has two sources, lag (older weights) and numerics (another implementation); the ratio covers both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from molt_core.algo.losses import ratio
from molt_core.config import CorrectionConfig


def correction(
    proximal_logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, config: CorrectionConfig
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Weights ``[N]`` without gradient, and metrics a token.

    With rho = proximal over behaviour policy, token by token: "truncate" gives min(rho, high) (truncated importance sampling,
    Ionides 2008, doi 10.1198/106186008X320456), "clip" clamps rho to [low, high], "mask" gives rho inside [low, high] and 0 outside.
    Level "off" gives ones. Raises ValueError for a behaviour log-probability that is not finite: the engine's, not ours to hide.
    """
    if not bool(torch.isfinite(behaviour_logprobs).all()):
        raise ValueError("behaviour log-probabilities are not finite: the engine returned a token without one")
    rho = ratio(proximal_logprobs.detach(), behaviour_logprobs)
    metrics = {"importance_ratio": rho}
    if config.level == "off":
        return torch.ones_like(rho), metrics
    outside = (rho > config.high) | (rho < config.low)
    if config.mode == "truncate":
        return rho.clamp(max=config.high), metrics | {"importance_truncated": rho > config.high}
    if config.mode == "clip":
        return rho.clamp(config.low, config.high), metrics | {"importance_truncated": outside}
    return torch.where(outside, 0.0, rho), metrics | {"importance_masked": outside}
