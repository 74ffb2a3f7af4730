"""The FSDP2 backend: a transformers model, sharded with ``fully_shard``, stepped with AdamW.

Each decoder layer and vision block is one sharding unit, the rest (embedding, norms, output layer) the root's. Gradients are
summed, not averaged, over the ranks, because the loss is a sum of weighted tokens already. Weights, optimiser state
and reductions are float32; the forward pass computes in ``model.dtype``, which is also what the engine receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from molt_core.config import ModelConfig, OptimizerConfig, TrainerConfig
from molt_core.models.load import load_policy
from molt_core.train.backend import can_step
from molt_core.train.collate import MicroBatch
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.optimizer import decays, lr_factor
from molt_core.train.policy import ActionPolicy

PREFIX = "policy."


class FSDP2Backend:
    """See ``TrainBackend``. All ranks share the rows; ``layout`` has no keys."""

    def __init__(
        self,
        checkpoint: Path,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        total_steps: int,
    ) -> None:
        if trainer.layout:
            raise ValueError(f"trainer.layout {trainer.layout} is not known to fsdp2: remove it")
        self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(trainer.device)
        self.dtype = getattr(torch, model.dtype)
        policy = load_policy(checkpoint, torch.float32).train()
        if trainer.activation_checkpointing:
            policy.gradient_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}  # nothing random inside
            )
        self._router_logits: dict[nn.Module, torch.Tensor] = {}
        self._top_k = policy.config.text_config.num_experts_per_tok
        for module in policy.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._keep_router_logits)
        mesh = init_device_mesh(trainer.device, (self.data_size,))
        # A group of its own, because a save in the background takes turns with the trainer's collectives in no fixed order.
        self._checkpoint_group = dist.new_group(backend="gloo")
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for unit in (*policy.model.visual.blocks, *policy.model.language_model.layers):
            fully_shard(unit, mesh=mesh, mp_policy=precision)
        self.root = fully_shard(ActionPolicy(policy), mesh=mesh, mp_policy=precision)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.clip_norm = optimizer.clip_norm
        parameters = list(self.root.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in parameters if decays(p.ndim, optimizer) is decayed],
                    "weight_decay": optimizer.weight_decay if decayed else 0.0,
                }
                for decayed in (True, False)
            ],
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(step, total_steps, optimizer)
        )

    def _keep_router_logits(self, module: nn.Module, inputs: tuple, output: tuple) -> None:
        self._router_logits[module] = output[0].detach()

    def action_logprobs(
        self, micro_batch: MicroBatch, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._router_logits.clear()
        return self.root(micro_batch.to(self.device), distribution)

    def router_gap(self) -> torch.Tensor | None:
        if not self._router_logits:
            return None
        gaps = []
        for logits in self._router_logits.values():
            best = logits.float().topk(self._top_k + 1, dim=-1).values
            gaps.append(best[:, -2] - best[:, -1])
        return torch.stack(gaps).amin(0)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()  # reduced at once: unsharded gradients of the whole model would not fit a large one

    def optimizer_step(self, apply: bool = True) -> float:
        norm = nn.utils.clip_grad_norm_(self.root.parameters(), self.clip_norm)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if apply and can_step(norm):
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.root.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name.removeprefix(PREFIX), whole.to(self.dtype)

    def save(self, folder: Path) -> Future:
        return dcp.async_save(
            self._state(), checkpoint_id=folder, process_group=self._checkpoint_group
        )

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.root,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.root, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}
