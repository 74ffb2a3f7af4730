"""Importance correction for the difference between the policy that sampled a token and the one about to be trained.

The difference has two sources, lag (older weights) and numerics (another implementation); the ratio covers both. What is
masked keeps its place in the aggregation: the gradient of a batch that is half rejected is half as long.

Schemes of ``algorithm.correction`` and their sources: tis, Yao et al. 2025 ("Your efficient RL framework secretly brings you
off-policy RL training"); icepop, Ling Team 2025 (arXiv 2510.18855); sequence_masked_tis, Liu et al. 2025 ("When speed kills
stability: demystifying RL collapse from the training-inference mismatch"), the geometric mean as the gate; binary_kl and tv,
Qi et al. 2026 (arXiv 2602.04879), equations 14 and 13, with the thresholds of the authors' own runs, here as symmetric gates
(equation 12 masks only what moves further away). Where a source gives a range of thresholds, those here are one choice from it:
set the fields to choose another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from molt_core.algo.config import CorrectionConfig
from molt_core.algo.losses import LOG_RATIO_BOUND, log_ratio, sequence_mean, sequence_sum

PROBABILITY_BOUND = 1e-6
"""Probabilities are kept this far from 0 and 1 in the binary KL divergence, which has no value there."""


def correction(
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    sequence: torch.Tensor,
    config: CorrectionConfig,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Weights ``[N]`` without gradient, and what shows them at work: which tokens a bound or a mask has changed, ``[N]`` bool.

    With rho = proximal over behaviour policy and u = ``gate_statistic``, token by token: "truncate" gives min(u, high)
    (truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456), "clip" clamps u to [low, high], "mask" gives
    rho, not above ``truncate_kept``, where u is inside [low, high] and 0 outside. Level "off" gives ones.

    Raises ValueError for a behaviour log-probability that is not finite: that is the engine's fault and not ours to hide. (A
    proximal one that is not finite stays visible in the loss.)
    """
    if not bool(torch.isfinite(behaviour_logprobs).all()):
        raise ValueError(
            "behaviour log-probabilities are not finite: the engine returned a token without one"
        )
    proximal_logprobs = proximal_logprobs.detach()
    rho = log_ratio(proximal_logprobs, behaviour_logprobs).exp()
    if config.level == "off":
        return torch.ones_like(rho), {}
    u = gate_statistic(proximal_logprobs, behaviour_logprobs, sequence, config)
    above, outside = u > config.high, (u > config.high) | (u < config.low)
    if config.mode == "truncate":
        return u.clamp(max=config.high), {"importance_truncated": above}
    if config.mode == "clip":
        return u.clamp(config.low, config.high), {"importance_clipped": outside}
    kept = rho if config.truncate_kept is None else rho.clamp(max=config.truncate_kept)
    return torch.where(outside, 0.0, kept), {"importance_masked": outside}


def gate_statistic(
    proximal_logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    sequence: torch.Tensor,
    config: CorrectionConfig,
) -> torch.Tensor:
    """What is compared with the bounds, ``[N]``, equal for all tokens of a rollout where the level is not "token".

    Gate "ratio": rho of the token, the product of rho over the rollout ("sequence"), or its geometric mean ("geometric").
    Gates "tv" and "binary_kl": divergence of the two policies reduced to "this token or another", with probabilities p
    (behaviour) and q (proximal): |p - q| and p log(p/q) + (1-p) log((1-p)/(1-q)), of the token or its mean over the rollout
    ("sequence").
    """
    if config.gate == "ratio":
        logs = log_ratio(proximal_logprobs, behaviour_logprobs)
        if config.level == "sequence":
            logs = sequence_sum(logs, sequence).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        elif config.level == "geometric":
            logs = sequence_mean(logs, sequence)
        return logs.exp()
    p, q = behaviour_logprobs.exp(), proximal_logprobs.exp()
    if config.gate == "tv":
        divergence = (p - q).abs()
    else:
        p, q = (x.clamp(PROBABILITY_BOUND, 1 - PROBABILITY_BOUND) for x in (p, q))
        divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return sequence_mean(divergence, sequence) if config.level == "sequence" else divergence


def effective_sample_fraction(weight_sum: float, square_sum: float, count: int) -> float:
    """``(sum w)^2 / (N sum w^2)``: 1 where all N weights are equal, 1/N where one carries all, 0 where all are 0.

    Kong 1992 (Univ. of Chicago, Dept. of Statistics, technical report 348). From sums, which add up over ranks.
    """
    return weight_sum**2 / (count * square_sum) if square_sum else 0.0
