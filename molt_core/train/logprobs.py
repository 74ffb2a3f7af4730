"""Log-probabilities and entropies of sampled tokens, without ever holding ``[tokens, vocabulary]``.

At 16,384 tokens and 151,936 ids one float32 copy of the logits is 10 GB, and a plain log-softmax keeps several. Here the output
layer and its softmax are computed over a few tokens at a time, forward and again in backward; what is kept between the two is
one number a token. The weight's gradient is summed in float32. Only positions that predict an action come here at all.

Where ranks hold parts of the vocabulary (``group``), maxima and sums are reduced over them and no rank sees a whole row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at the same time. Changes memory and nothing else."""


@dataclass(frozen=True)
class ActionDistribution:
    """What the engine samples from, given logits: divided by ``temperature``, and never one of ``excluded_ids`` (``[E]``)."""

    temperature: float
    excluded_ids: torch.Tensor

    def log_softmax(
        self, logits: torch.Tensor, first_id: int = 0, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """``[n, ids]`` raw logits of the ids from ``first_id`` on, to log-probabilities (float32, -inf where excluded)."""
        excluded = self._columns(first_id, logits.shape[1])
        logits = logits.to(_precision(logits)).index_fill(1, excluded, -torch.inf)
        logits = logits.div_(self.temperature)
        if group is None:
            return logits.log_softmax(-1)
        largest = _reduced(logits.amax(-1, keepdim=True), group, dist.ReduceOp.MAX)
        total = _reduced((logits - largest).exp_().sum(-1, keepdim=True), group)
        return logits.sub_(largest).sub_(total.log())

    def entropy(
        self, log_softmax: torch.Tensor, first_id: int = 0, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """``[n]`` nats, of what ``log_softmax`` returned."""
        finite = log_softmax.index_fill(1, self._columns(first_id, log_softmax.shape[1]), 0.0)
        return -_reduced(log_softmax.exp().mul_(finite).sum(-1), group)

    def _columns(self, first_id: int, count: int) -> torch.Tensor:
        excluded = self.excluded_ids - first_id
        return excluded[(excluded >= 0) & (excluded < count)]


def action_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    distribution: ActionDistribution,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each of ``ids [N]`` and the entropy at its place, in nats: both ``[N]`` float32, differentiable.

    hidden ``[N, hidden]``: the decoder's output at the predicting positions. weight ``[vocabulary, hidden]`` of the output
    layer, or this rank's equal share of its rows in the order of ranks in ``group``, over which the gradient of ``hidden`` is
    then summed. An id that can never be sampled, or that the vocabulary lacks, has log-probability -inf.
    """
    return _ActionLogprobs.apply(hidden, weight, ids, distribution, group, chunk_tokens)


class _ActionLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, ids, distribution, group, chunk_tokens):
        first_id = 0 if group is None else dist.get_rank(group) * len(weight)
        ctx.save_for_backward(hidden, weight, ids)
        ctx.distribution, ctx.chunk_tokens = distribution, chunk_tokens
        ctx.shard = (first_id, group)
        ctx.set_materialize_grads(False)
        logprobs, entropy = (hidden.new_empty(len(ids), dtype=_precision(hidden)) for _ in range(2))
        for part in _parts(len(ids), chunk_tokens):
            log_softmax = distribution.log_softmax(hidden[part] @ weight.T, first_id, group)
            column, here = _own_column(ids[part], first_id, len(weight))
            own = log_softmax.gather(1, column).masked_fill_(~here, 0.0)
            nowhere = ids[part] >= len(weight) * (
                1 if group is None else dist.get_world_size(group)
            )
            logprobs[part] = _reduced(own.squeeze(1), group).masked_fill(nowhere, -torch.inf)
            entropy[part] = distribution.entropy(log_softmax, first_id, group)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, logprob_gradient, entropy_gradient):
        """By z = logits / temperature: d logprob / d z_j = [j = id] - p_j; d entropy / d z_j = -p_j (log p_j + entropy)."""
        hidden, weight, ids = ctx.saved_tensors
        first_id, group = ctx.shard
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=_precision(weight))
        for part in _parts(len(ids), ctx.chunk_tokens):
            log_softmax = ctx.distribution.log_softmax(hidden[part] @ weight.T, first_id, group)
            gradient = torch.zeros_like(log_softmax)
            if logprob_gradient is not None:
                column, here = _own_column(ids[part], first_id, len(weight))
                upstream = logprob_gradient[part, None]
                gradient -= log_softmax.exp() * upstream
                gradient.scatter_add_(1, column, upstream * here)
            if entropy_gradient is not None:
                entropy = ctx.distribution.entropy(log_softmax, first_id, group)[:, None]
                probabilities = log_softmax.exp()
                surprise = log_softmax.masked_fill(probabilities == 0, 0.0) + entropy
                gradient -= probabilities * surprise * entropy_gradient[part, None]
            gradient = gradient.div_(ctx.distribution.temperature).to(weight.dtype)
            torch.mm(gradient, weight, out=hidden_gradient[part])
            weight_gradient += gradient.T @ hidden[part]
        return _reduced(hidden_gradient, group), weight_gradient.to(weight.dtype), *4 * (None,)


def _precision(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _own_column(ids: torch.Tensor, first_id: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each id stands among this rank's ids, and whether it is one of them; both ``[n, 1]``."""
    column = ids[:, None] - first_id
    here = (column >= 0) & (column < count)
    return column.clamp(0, count - 1), here


def _reduced(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, operation=dist.ReduceOp.SUM
) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(tensor, operation, group)
    return tensor
