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

    With rho = proximal over behaviour policy, token by token: "truncate" gives min(rho, high) (truncated importance
    sampling, Ionides 2008, doi 10.1198/106186008X320456), "clip" clamps rho to [low, high], "mask" gives rho inside
    [low, high] and 0 outside. Level "off" gives ones. Raises ValueError for a behaviour log-probability that is not finite:
    that is the engine's fault and not ours to hide. (A proximal one that is not finite stays visible in the loss.)
    """
    if not bool(torch.isfinite(behaviour_logprobs).all()):
        raise ValueError(
            "behaviour log-probabilities are not finite: the engine returned a token without one"
        )
    rho = ratio(proximal_logprobs.detach(), behaviour_logprobs)
    if config.level == "off":
        weights, indicator = torch.ones_like(rho), {}
    elif config.mode == "truncate":
        weights = rho.clamp(max=config.high)
        indicator = {"importance_truncated": rho > config.high}
    else:
        outside = (rho > config.high) | (rho < config.low)
        if config.mode == "clip":
            weights, indicator = rho.clamp(config.low, config.high), {"importance_clipped": outside}
        else:
            weights, indicator = torch.where(outside, 0.0, rho), {"importance_masked": outside}
    return weights, {
        "importance_ratio": rho,
        "importance_weight": weights,
        "importance_weight_squared": weights.square(),
        **indicator,
    }


def effective_sample_fraction(weight_sum: float, square_sum: float, count: int) -> float:
    """``(sum w)^2 / (N sum w^2)``: 1 where all N weights are equal, 1/N where one carries all, 0 where all are 0.

    Kong 1992 (Univ. of Chicago, Dept. of Statistics, technical report 348). From sums, which add up over ranks.
    """
    return weight_sum**2 / (count * square_sum) if square_sum else 0.0
