"""What the frozen optimiser specification means, for every backend: schedule, decay filter, and how far a step went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.distributed.tensor import DTensor

from molt_core.config import OptimizerConfig

CHUNK_ELEMENTS = 2**26
"""Elements of the parameters whose last change is computed at the same time."""


def lr_factor(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Factor on ``config.lr`` for optimiser step ``step`` (0-based) of ``total_steps``.

    Linear warm-up over ``warmup_steps`` reaches 1 at step ``warmup_steps - 1``; "linear" and "cosine" then fall towards 0,
    which they would reach at step ``total_steps``; cosine: Loshchilov and Hutter 2017 (arXiv 1608.03983), "cosine annealing".
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    left = (total_steps - step) / max(1, total_steps - config.warmup_steps)
    return left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2


def decays(dimensions: int, config: OptimizerConfig) -> bool:
    """Whether a parameter of ``dimensions`` dimensions (in the Hugging Face shape) is decayed."""
    return config.decay_filter == "all" or dimensions >= 2


@torch.no_grad()
def squared_update_and_weight(
    optimizer: torch.optim.AdamW, counts: Callable[[torch.Tensor], bool] = lambda parameter: True
) -> torch.Tensor:
    """``[2]`` float64: squared L2 norms of what the last step added to the weights, and of the weights now.

    Over the parts of the parameters that this rank holds, those for which ``counts`` says yes. No copy of the weights is
    needed: the moments say what AdamW added (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2).
    """
    total = torch.zeros(2, dtype=torch.float64)
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if counts(p) and optimizer.state[p]]
        for chunk in _chunks(parameters):
            states = [optimizer.state[parameter] for parameter in chunk]
            weights = [_local(parameter) for parameter in chunk]
            added = _added(group, states, weights)
            for place, tensors in enumerate((added, weights)):
                norms = torch.stack(torch._foreach_norm(tensors))
                total[place] += norms.double().square().sum().cpu()
    return total


def _added(group: dict, states: list[dict], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    rate, decay, step = group["lr"], group["weight_decay"], float(states[0]["step"])
    first, second = (1 - beta**step for beta in group["betas"])
    added = list(torch._foreach_sqrt([_local(state["exp_avg_sq"]) for state in states]))
    torch._foreach_div_(added, math.sqrt(second))
    torch._foreach_add_(added, group["eps"])
    added = torch._foreach_div([_local(state["exp_avg"]) for state in states], added)
    torch._foreach_mul_(added, -rate / first)
    if decay:  # before the step the weights were (weights - added) / (1 - rate * decay)
        decayed = torch._foreach_sub(weights, added)
        torch._foreach_mul_(decayed, rate * decay / (1 - rate * decay))
        torch._foreach_sub_(added, decayed)
    return added


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk, elements = [], 0
    for tensor in tensors:
        if chunk and elements + tensor.numel() > CHUNK_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
        chunk.append(tensor)
        elements += tensor.numel()
    if chunk:
        yield chunk
