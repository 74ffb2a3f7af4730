"""From log-probabilities to a gradient, the same for every backend: correction, loss, one denominator.

A rank calls ``forward_backward`` with its share of the rows. What it returns are sums over its action tokens; divided by the
global denominator after adding up the ranks they are the step's metrics, whatever the layout was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from molt_core.algo.importance import correction
from molt_core.algo.kl import k3
from molt_core.algo.losses import LossTokens, loss_function
from molt_core.config import AlgorithmConfig
from molt_core.train.backend import TrainBackend
from molt_core.train.collate import MicroBatch, collate
from molt_core.train.logprobs import ActionDistribution
from molt_core.types import NOT_SAMPLED, Trajectory


def forward_backward(
    backend: TrainBackend,
    micro_batches: Sequence[tuple[Sequence[Trajectory], Sequence[np.ndarray]]],
    *,
    algorithm: AlgorithmConfig,
    distribution: ActionDistribution,
    denominator: int,
) -> dict[str, float]:
    """Accumulate the gradient of this rank's micro-batches (rows and their advantages). Every rank passes equally many.

    Returns this rank's sums: ``tokens``, ``tokens_forward``, ``loss`` (already over the denominator) and, per action token,
    ``entropy``, ``kl`` (k3 of behaviour to current policy) and the loss's and correction's indicators.
    """
    loss_of = loss_function(algorithm.loss)
    sums: dict[str, float] = {"tokens": 0, "tokens_forward": 0, "loss": 0.0}
    for number, (rows, advantages) in enumerate(micro_batches):
        batch = collate(rows, advantages)
        logprobs, entropy = backend.action_logprobs(batch, distribution)
        batch = batch.to(logprobs.device)
        behaviour = batch.behaviour_logprobs
        proximal = logprobs.detach() if algorithm.proximal == "current" else behaviour
        weights, correction_metrics = correction(proximal, behaviour, algorithm.correction)
        per_token, loss_metrics = loss_of(
            LossTokens(logprobs, proximal, behaviour, batch.advantages), algorithm
        )
        loss = (per_token * weights).sum() / denominator
        backend.backward(loss, is_last=number == len(micro_batches) - 1)
        per_token_metrics = {
            "entropy": entropy.detach(),
            "kl": k3(behaviour, logprobs.detach()),
            **correction_metrics,
            **loss_metrics,
        }
        sums["tokens"] += len(batch.action_ids)
        sums["tokens_forward"] += batch.tokens_forward
        sums["loss"] += float(loss.detach())
        for name, values in per_token_metrics.items():
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())
    return sums


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
    gap = backend.router_gap()
    if gap is None:
        return batch, logprobs, torch.zeros_like(logprobs, dtype=torch.bool)
    tie = (gap.to(logprobs.device) < tie_gap) & batch.attention_mask
    tied_from_here = tie.cummax(dim=1).values
    return batch, logprobs, tied_from_here[batch.action_rows, batch.action_columns - 1]


def without_actions(row: Trajectory) -> Trajectory:
    """The row as mere context: it fills a micro-batch of a rank that has no rows left and adds nothing to any sum."""
    return replace(
        row,
        action_mask=np.zeros_like(row.action_mask),
        logprobs=np.zeros_like(row.logprobs),
        versions=np.full_like(row.versions, NOT_SAMPLED),
        turns=(),
    )


def split_rows(
    lengths: Sequence[int], data_size: int, micro_batch_rows: int
) -> list[list[list[int]]]:
    """Row indices by rank and micro-batch: ``out[rank][micro_batch]``; every rank has equally many micro-batches.

    Longest row first to the rank with the fewest tokens and a place left, then micro-batches of rows of similar length. No
    row is dropped or repeated; a micro-batch may be empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(data_size)]
    tokens = [0] * data_size
    capacity = -(-len(lengths) // data_size)
    for index in order:
        rank = min(
            (r for r in range(data_size) if len(shares[r]) < capacity), key=lambda r: (tokens[r], r)
        )
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    count = max(1, -(-capacity // micro_batch_rows))
    return [
        [share[m * micro_batch_rows : (m + 1) * micro_batch_rows] for m in range(count)]
        for share in shares
    ]
