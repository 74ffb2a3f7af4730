"""From log-probabilities to a gradient, the same for every backend: correction, loss, penalties, one weighted sum.

A rank calls ``forward_backward`` with its share of the rollouts. What it returns are sums over its action tokens; divided by
the number of tokens after adding up the ranks they are the step's metrics, whatever the layout was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.config import AlgorithmConfig
from molt_core.algo.importance import correction
from molt_core.algo.kl import k3, kl_loss
from molt_core.algo.losses import LossTokens, loss_function, ratio
from molt_core.fields import FIELDS, OF_LOSSES
from molt_core.train.backend import TrainBackend
from molt_core.train.collate import MicroBatch, collate
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.routing import routing_sums
from molt_core.types import Trajectory

OWN_SUMS = ("tokens", "tokens_forward", "tokens_kept", "loss")
ROUTING_SUMS = ("expert_tokens", "router_recorded", "router_changed")


def forward_backward(
    backend: TrainBackend,
    micro_batches: Sequence[Sequence[WeightedRollout]],
    *,
    algorithm: AlgorithmConfig,
    distribution: ActionDistribution,
) -> dict[str, Any]:
    """Accumulate the gradient of this rank's micro-batches. Every rank passes equally many.

    Returns this rank's sums: ``tokens``, ``tokens_forward``, ``tokens_kept`` (of importance weight other than 0), ``loss``
    (weighted: its sum is what is stepped on) and, per action token and unweighted, ``entropy``, ``kl`` (k3 of behaviour to
    current policy), ``kl_reference`` where there is one, and the loss's and the correction's indicators; with routers, those
    of ``routing.routing_sums``. What only fills up a short share (``split.filler_row``) is no work and is not counted.
    """
    sums: dict[str, Any] = dict.fromkeys(OWN_SUMS, 0)
    for number, rollouts in enumerate(micro_batches):
        rows = [segment for rollout in rollouts for segment in rollout.segments]
        batch = collate(rows, [rollout.advantages for rollout in rollouts])
        logprobs, entropy = backend.action_logprobs(batch, distribution)
        batch = batch.to(logprobs.device)
        loss, metrics = weighted_loss(rollouts, batch, logprobs, entropy, algorithm)
        backend.backward(loss, is_last=number == len(micro_batches) - 1)
        sums["tokens"] += len(batch.action_ids)
        sums["tokens_forward"] += sum(one.tokens_forward for one in rollouts if len(one.weights))
        sums["loss"] += float(loss.detach())
        totals = {name: float(values.double().sum()) for name, values in metrics.items()}
        if len(batch.action_ids):
            totals |= routing_sums(backend.routing(), batch.routed_experts)
        for name, value in totals.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def weighted_loss(
    rollouts: Sequence[WeightedRollout],
    batch: MicroBatch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch's part of the objective, a scalar, and its metrics ``[N]`` without gradient.

    batch: what ``collate`` made of ``rollouts``; logprobs and entropy ``[N]``: the policy's, of its action tokens.
    """
    counts = [len(rollout.weights) for rollout in rollouts]
    sequence = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(logprobs.device)
    behaviour, current = batch.behaviour_logprobs, logprobs.detach()
    proximal = current if algorithm.proximal == "current" else behaviour
    importance, corrected = correction(proximal, behaviour, sequence, algorithm.correction)
    tokens = LossTokens(logprobs, proximal, behaviour, batch.advantages, sequence)
    per_token, indicators = loss_function(algorithm.loss)(tokens, algorithm)
    check_result(algorithm.loss, len(logprobs), per_token, indicators)
    per_token = per_token * importance
    whole = importance
    if algorithm.proximal == "rollout":  # where the loss has the ratio within it
        whole = whole * ratio(current, behaviour)
    metrics = {
        "tokens_kept": importance != 0,
        "entropy": entropy.detach(),
        "kl": k3(behaviour, current),
        "importance_ratio": ratio(current, behaviour),
        "importance_weight": whole,
        "importance_weight_squared": whole.square(),
        **corrected,
    }
    penalty, reference = algorithm.kl, None
    if rollouts[0].reference_logprobs is not None:
        reference = flat(rollouts, "reference_logprobs").to(logprobs.device)
        metrics["kl_reference"] = k3(current, reference) * importance
    if penalty.coef and penalty.place == "loss":
        if penalty.base == "reference":
            kl = kl_loss(penalty.estimator, logprobs, reference, False) * importance
        else:
            kl = kl_loss(penalty.estimator, logprobs, behaviour, True)
        per_token = per_token + penalty.coef * kl
    if algorithm.entropy_coef:
        per_token = per_token - algorithm.entropy_coef * entropy
    weights = flat(rollouts, "weights").to(logprobs.device)
    if taken := indicators.keys() & ({*metrics, *FIELDS, *OWN_SUMS, *ROUTING_SUMS} - OF_LOSSES):
        raise ValueError(
            f"algorithm.loss: {algorithm.loss} returned an indicator {min(taken)}, which is a metric already; rename it"
        )
    return (per_token * weights).sum(), {**metrics, **indicators}


def check_result(
    loss: str, count: int, per_token: torch.Tensor, indicators: Mapping[str, torch.Tensor]
) -> None:
    """Raise ValueError unless a loss and its indicators are one number a token: another shape would weigh tokens otherwise."""
    for name, values in {"loss": per_token, **indicators}.items():
        if tuple(values.shape) != (count,):
            raise ValueError(
                f"algorithm.loss: {loss} returned {name} of shape {list(values.shape)} for {count} tokens; one number a token "
                f"is due, [{count}]: weights and means are the objective's part"
            )


def flat(rollouts: Sequence[WeightedRollout], field: str) -> torch.Tensor:
    """One of their fields, ``[N]``."""
    return torch.from_numpy(np.concatenate([getattr(rollout, field) for rollout in rollouts]))


@torch.no_grad()
def row_logprobs(
    backend: TrainBackend, rows: Sequence[Trajectory], distribution: ActionDistribution
) -> list[np.ndarray]:
    """Log-probabilities of each row's sampled tokens, ``[action_tokens]`` float32 a row."""
    logprobs, _ = backend.action_logprobs(collate(rows), distribution)
    return np.split(logprobs.cpu().numpy(), np.cumsum([row.action_tokens for row in rows])[:-1])


@torch.no_grad()
def score(
    backend: TrainBackend,
    rows: Sequence[Trajectory],
    *,
    distribution: ActionDistribution,
    tie_gap: float,
) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """Trainer log-probabilities of sampled tokens: (micro-batch, logprobs ``[N]``, tied ``[N]`` bool).

    A token is tied where, at a position up to the one that predicts it, the router's k-th and (k+1)-th scores of some layer
    lie closer than ``tie_gap``: rounding may choose another expert there, and all later tokens attend to it.
    """
    batch = collate(rows)
    logprobs, _ = backend.action_logprobs(batch, distribution)
    batch = batch.to(logprobs.device)
    choices = backend.routing()
    if not choices:
        return batch, logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
    tie = torch.stack([choice.gap for choice in choices]).amin(0) < tie_gap
    before = F.pad(tie.cumsum(0), (1, 0))  # ties before each position, of all rows
    tied = before[batch.action_positions] > before[batch.row_starts[batch.action_rows]]
    return batch, logprobs, tied
