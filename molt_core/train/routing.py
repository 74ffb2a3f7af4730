"""Which experts a token goes to: computed in float32, observed, and replayed as the engine chose.

A mixture of experts can send the same token elsewhere in trainer and engine, because rounding decides between two close
scores. Replay (``model.routing_replay``) sends it where the engine did: the choice is the record's, its weights come from the
trainer's own logits, so that the router learns. A token without a record (-1) is routed as usual. Ma et al. 2025
(arXiv 2510.11370) call this rollout routing replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from molt_core.models.layout import decoder_of
from molt_core.train.collate import MicroBatch
from molt_core.types import Trajectory


@dataclass(frozen=True)
class Choice:
    """One router's part in one forward pass. Experts of a token lie in the order of their scores, in no record's.

    natural and chosen ``[T, k]`` int64: the k best experts, and those that the tokens went to; gap ``[T]`` float32: the k-th
    best logit minus the next one (of logits, not probabilities: it does not shrink where the router is sure); experts: how
    many there are to choose from.
    """

    natural: torch.Tensor
    chosen: torch.Tensor
    gap: torch.Tensor
    experts: int


def choose(logits: torch.Tensor, k: int, replay: torch.Tensor | None = None) -> Choice:
    """The choice by ``logits [T, experts]`` float32; rows of ``replay [T, k]`` without a -1 stand in its place."""
    experts = logits.shape[1]
    best = logits.detach().topk(min(k + 1, experts), dim=-1)
    natural = chosen = best.indices[:, :k]
    next_best = best.values[:, k] if k < experts else torch.full_like(best.values[:, 0], -torch.inf)
    if replay is not None:
        chosen = torch.where((replay >= 0).all(-1, keepdim=True), replay, natural)
    return Choice(natural, chosen, best.values[:, k - 1] - next_best, experts)


class Router(nn.Module):
    """In place of Qwen3-MoE's: the same weight and result, in float32 whatever the model's precision.

    The weights of the chosen experts are the softmax over their logits, which is the softmax over all, renormalised.
    """

    def __init__(self, weight: nn.Parameter, k: int) -> None:
        super().__init__()
        self.weight, self.k = weight, k
        self.replay: torch.Tensor | None = None
        self.choice: Choice | None = None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden ``[T, hidden]`` to logits ``[T, experts]``, weights ``[T, k]``, both float32, and experts ``[T, k]``."""
        logits = F.linear(hidden.float(), self.weight.float())
        self.choice = choose(logits, self.k, self.replay)
        weights = logits.gather(1, self.choice.chosen).softmax(-1)
        return logits, weights, self.choice.chosen


def install_routers(policy: nn.Module) -> tuple[Router, ...]:
    """Put a ``Router`` into every mixture-of-experts layer of a transformers ``policy``, in order. Names stay the same."""
    blocks = [layer.mlp for layer in decoder_of(policy).layers]
    blocks = [block for block in blocks if hasattr(block, "gate")]
    for block in blocks:
        block.gate = Router(block.gate.weight, policy.config.get_text_config().num_experts_per_tok)
    return tuple(block.gate for block in blocks)


def replay(routers: Sequence[Router], batch: MicroBatch) -> None:
    """Let the next forward pass of ``routers`` choose what ``batch`` records, and as usual where it has no record.

    They may be any objects with a ``replay``. Raises ValueError where the record is one of another number of routers.
    """
    if batch.routed_experts is None:
        records: Sequence[torch.Tensor | None] = (None,) * len(routers)
    else:
        _check_layers(batch.routed_experts, len(routers))
        records = batch.routed_experts.unbind(1)
    for router, record in zip(routers, records):
        router.replay = record


def check_recorded(rows: Iterable[Trajectory]) -> None:
    """Raise ValueError where none of a whole batch's ``rows`` has a record to replay; one that lacks it routes as usual."""
    if all(row.routed_experts is None for row in rows):
        raise ValueError(
            "model.routing_replay: no trajectory carries routed_experts; let the engine record them, or set it to false"
        )


def _check_layers(record: torch.Tensor, routers: int) -> None:
    if record.shape[1] != routers:
        raise ValueError(
            f"routed_experts records {record.shape[1]} layers, the model has {routers} routers: the record is another model's"
        )


def routing_sums(choices: Sequence[Choice], record: torch.Tensor | None) -> dict:
    """What the routers did, in numbers that add up over micro-batches and ranks.

    expert_tokens ``[layers, experts]``: tokens (all that were passed forward) that went to each expert. Where there is a
    record: router_recorded, tokens with one, and router_changed ``[layers]``, those of them whose k best experts are others.
    """
    if not choices:
        return {}
    loads = [torch.bincount(c.chosen.flatten(), minlength=c.experts) for c in choices]
    sums = {"expert_tokens": torch.stack(loads).double().cpu().numpy()}
    if record is None:
        return sums
    _check_layers(record, len(choices))
    recorded = (record >= 0).all(-1).all(-1)
    changed = [
        (choice.natural.sort(-1).values != record[:, layer].sort(-1).values).any(-1) & recorded
        for layer, choice in enumerate(choices)
    ]
    return sums | {
        "router_recorded": float(recorded.sum()),
        "router_changed": torch.stack(changed).sum(1).double().cpu().numpy(),
    }


def routing_metrics(sums: dict) -> dict[str, dict[int, float]]:
    """Takes ``routing_sums`` out of ``sums``; by layer, for the record of a step:

    expert_load_max: tokens of the busiest expert over the mean (1 is even). router_disagreement: share of recorded tokens whose
    k best experts differ between rollout and trainer, absent where nothing was recorded.
    """
    load, recorded = sums.pop("expert_tokens", None), sums.pop("router_recorded", 0)
    changed = sums.pop("router_changed", None)
    fields = {}
    if load is not None:
        fields["expert_load_max"] = _by_layer(load.max(1) / load.mean(1))
    if recorded:
        fields["router_disagreement"] = _by_layer(changed / recorded)
    return fields


def _by_layer(values: np.ndarray) -> dict[int, float]:
    return dict(enumerate(values.tolist()))
