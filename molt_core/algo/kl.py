"""Estimators of a Kullback-Leibler divergence from log-probabilities of sampled tokens (Schulman 2020, "Approximating KL
divergence", joschu.net/blog/kl-approx.html).

All take log-probabilities ``[N]`` of tokens sampled from the policy ``logprobs`` and estimate, token by token, in nats,
``KL(policy || base)``. As a *metric* k1 and k3 are unbiased and k3 has the smaller variance. As a *loss term* only the gradient
of k2 points the right way under on-policy samples; k1's expected gradient is zero. As a *reward* k1 is the exact one.
"""

from __future__ import annotations

import torch


def k1(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``log pi - log base``: unbiased, may be negative."""
    return logprobs - base


def k2(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``(log pi - log base)^2 / 2``: biased, never negative."""
    return (logprobs - base).square() / 2


def k3(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``r - 1 - log r`` with ``r = base / pi``: unbiased, never negative."""
    log_ratio = base - logprobs
    return torch.expm1(log_ratio) - log_ratio
