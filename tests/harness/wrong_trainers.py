"""Trainers with one fault each, that a conformance must find."""

import torch
import torch.distributed as dist

from molt_core.train.fsdp2 import FSDP2Backend


class DecaysEverything(FSDP2Backend):
    """Applies weight decay to norms and biases, against the protocol's filter."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        decays = max(group["weight_decay"] for group in self.optimizer.param_groups)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = decays


class AveragesGradients(FSDP2Backend):
    """Halves the gradient, as a mean over two ranks would."""

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        super().backward(loss / 2, is_last)


class FailsOnTheSecondRank(FSDP2Backend):
    """While the first rank waits for it in a collective."""

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("the second rank gives up")
        super().backward(loss, is_last)
