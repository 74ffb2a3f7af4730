"""Estimators of a Kullback-Leibler divergence from log-probabilities of sampled tokens (Schulman 2020, "Approximating KL
divergence", joschu.net/blog/kl-approx.html).

All take log-probabilities ``[N]`` of tokens sampled from the policy ``logprobs`` and estimate, token by token, in nats,
``KL(policy || base)``. What each is good for (E over samples of the policy):

    as a      k1                     k2                            k3
    metric    unbiased               biased (second order)         unbiased, smaller variance than k1
    reward    exact gradient         biased: refused               biased: refused
    loss      E gradient 0: refused  exact gradient of             exact gradient of KL(base || policy), the other
                                     KL(policy || base)            direction (Shao et al. 2024, arXiv 2402.03300, eq. 4)

A reward is not differentiated; k2 and k3 lack the gradient of their own dependence on the policy there. Under lag k1 as a
reward is exact with the log-probability of the policy that is stepped, and with the full importance weight: the weight makes
the sampler's expectation the policy's, and does not turn ``log mu - log base`` into ``log pi - log base``. So the policy is
scored before its step (``AlgorithmConfig.scored_policies``); a truncated weight biases this term as it does any other.
The loss against a
*reference* policy is multiplied by the importance correction, as the expectation is over the policy and not over the sampler.

Against the *behaviour* policy tokens come from a fixed policy and the base is trained: ``estimator(behaviour, policy)``
estimates ``KL(behaviour || policy)`` from its own samples, k3's gradient is exact, k2's exact to first order in the log ratio,
and minimising k1 would raise the divergence. No correction belongs there.
"""

from __future__ import annotations

import math
import sys

import torch

from molt_core.algo.losses import log_ratio


def k1(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``log pi - log base``: unbiased, may be negative."""
    return logprobs - base


def k2(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``(log pi - log base)^2 / 2``, the logarithm bounded as k3's is: biased, never negative, always finite."""
    return log_ratio(logprobs, base).square() / 2


def k3(logprobs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``r - 1 - log r`` with ``r = base / pi``, its logarithm bounded: unbiased, never negative, always finite."""
    log_r = log_ratio(base, logprobs)
    return torch.expm1(log_r) - log_r


def kl_loss(
    estimator: str, logprobs: torch.Tensor, base: torch.Tensor, sampled_from_base: bool
) -> torch.Tensor:
    """The penalty a token, ``[N]``, with gradient in ``logprobs``; ``sampled_from_base``: the base is the behaviour policy."""
    term = {"k2": k2, "k3": k3}[estimator]
    return term(base, logprobs) if sampled_from_base else term(logprobs, base)


def next_coefficient(coef: float, measured: float, target: float, gain: float) -> float:
    """The coefficient of the next step, from the KL that was measured at this one, in nats a token as ``target``.

    ``e = clip(measured / target - 1, -0.2, 0.2)``, ``coef (1 + gain e)``: the log-space proportional controller of Ziegler et
    al. 2019 (arXiv 1909.08593), section 2.2, where gain is 0.1. Theirs is the KL of a whole episode; the ratio is the same in
    nats a token as long as lengths are. A horizon in episodes is this with ``gain = episodes a step / horizon``.
    Stays positive and finite. Raises ValueError where ``measured`` is no number.
    """
    if math.isnan(measured):
        raise ValueError("the KL to the reference is no number; algorithm.kl.target needs one")
    error = min(max(measured / target - 1, -0.2), 0.2)
    return min(max(coef * (1 + gain * error), sys.float_info.min), sys.float_info.max)
