"""The FSDP2 backend: a transformers model, sharded with ``fully_shard``, stepped with AdamW; a policy, or a critic.

Each decoder layer and vision block of some size is one sharding unit, the rest (embedding, norms, output layer) the root's.
Gradients are summed, not averaged, over the ranks, because the loss is a sum of weighted tokens already. Weights, optimiser
state and reductions are float32; the forward pass computes in ``model.dtype``, which is also what the engine receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from molt_core.config import ModelConfig, OptimizerConfig, TrainerConfig
from molt_core.models.layout import layers_of
from molt_core.models.load import load_policy
from molt_core.train.backend import can_step
from molt_core.train.collate import MicroBatch
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.optimizer import decays, lr_factor, squared_update_and_weight
from molt_core.train.policy import ActionPolicy, ValueModel
from molt_core.train.routing import Choice
from molt_core.train.state import FIRST, KINDS, SECOND, WEIGHTS, load_state, save_state
from molt_core.train.weights import Part, Weight, held_rows

PREFIX = "policy."


UNIT_ELEMENTS = 2**20
"""Least parameters of a sharding unit; a smaller layer is gathered with the root, because a collective costs more than it."""


def _is_large(layer: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in layer.parameters()) >= UNIT_ELEMENTS


class FSDP2Model:
    """What a policy and a critic have in common: sharding, backward pass, optimiser, saved state. See ``TrainBackend``.

    All ranks share the rows; ``layout`` has no keys.
    """

    module: type[ActionPolicy]
    """What is sharded, and called once a forward pass."""

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
        head = self.module(policy, model.routing_replay)
        self.routers = head.routers
        for router in self.routers:
            router.weight.requires_grad_(not optimizer.freeze_router)
        mesh = init_device_mesh(trainer.device, (self.data_size,))
        # A group of its own, because a save in the background takes turns with the trainer's collectives in no fixed order.
        self._checkpoint_group = dist.new_group(backend="gloo")
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        self.root = head
        units = (*filter(_is_large, layers_of(policy)), head)
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=precision)
            if self.data_size > 1:  # to divide by 1 is a pass over all gradients
                unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # Kept from here on: what the module names after a forward pass may be the gathered copy, which has no moments.
        self._sharded = {n.removeprefix(PREFIX): p for n, p in head.named_parameters()}
        self.frozen = frozenset(n for n, p in self._sharded.items() if not p.requires_grad)
        self.clip_norm = optimizer.clip_norm
        # The memory of this rank's shards: clipping and AdamW need no DTensor, which costs more than they do on small tensors.
        self._local = {n: nn.Parameter(p.to_local()) for n, p in self._sharded.items()}
        self._whole = self.data_size == 1 and self.dtype == torch.float32
        if self._whole:
            self._compute_with_shards(units)
        parameters = [self._local[n] for n, p in self._sharded.items() if p.requires_grad]
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
            fused=True,
        )
        self._optimizer_config, self._total_steps, self._steps = optimizer, total_steps, 0

    def _compute_with_shards(self, units: Sequence[FSDPModule]) -> None:
        """One rank's shards are whole, and of the precision it computes in: a step copies no weight and no gradient.

        What FSDP2 gathers is gathered once, here, and becomes another name of the shards' memory; there gradients stay.
        """
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.set_requires_gradient_sync(False, recurse=False)
        for name, gathered in self.root.named_parameters():
            gathered.untyped_storage().resize_(0)  # the copy
            gathered.data = self._local[name.removeprefix(PREFIX)].data
            self._local[name.removeprefix(PREFIX)] = gathered

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()  # reduced at once: unsharded gradients of the whole model would not fit a large one

    @torch.no_grad()
    def optimizer_step(self, apply: bool = True) -> float:
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:  # else it has none, or it is where it is stepped
                self._local[name].grad, parameter.grad = parameter.grad.to_local(), None
        gradients = [p.grad for p in self._local.values() if p.grad is not None]
        squared = nn.utils.get_total_norm(gradients).double().square()
        if not self._whole:
            dist.all_reduce(squared)
        norm = float(squared.sqrt())
        if apply and can_step(norm):
            nn.utils.clip_grads_with_norm_(self._local.values(), self.clip_norm, squared.sqrt())
            factor = lr_factor(self._steps, self._total_steps, self._optimizer_config)
            for group in self.optimizer.param_groups:
                group["lr"] = self._optimizer_config.lr * factor
            self.optimizer.step()
            self._steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def update_ratio(self) -> float:
        squares = squared_update_and_weight(self.optimizer).to(self.device)
        dist.all_reduce(squares)
        return float((squares[0] / squares[1]).sqrt())

    def weights(self, leave_out: frozenset[str] = frozenset()) -> Sequence[Weight]:
        return [
            sharded_weight(name, parameter, self.dtype)
            for name, parameter in self._sharded.items()
            if name not in leave_out
        ]

    def save(self, folder: Path) -> Future:
        return save_state(self._state(), self._steps, folder, self._checkpoint_group)

    def load(self, folder: Path) -> None:
        if not self._whole:
            self.root.reshard()  # what a forward pass left gathered is of the weights before
        self._steps = load_state(self._state(), folder, self._checkpoint_group)
        for moments in self.optimizer.state.values():
            moments["step"].fill_(self._steps)

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Weights and moments by kind and name: the tensors themselves, sharded as they are."""
        state = {kind: {} for kind in KINDS}
        for name, parameter in self._sharded.items():
            local = self._local[name]
            moments = self.optimizer.state[local]
            if not moments:  # not stepped yet
                moments["step"] = torch.zeros((), device=self.device)
                moments["exp_avg"] = torch.zeros_like(local)
                moments["exp_avg_sq"] = torch.zeros_like(local)
            state[WEIGHTS][name] = parameter.detach()
            state[FIRST][name] = _like(parameter, moments["exp_avg"])
            state[SECOND][name] = _like(parameter, moments["exp_avg_sq"])
        return state


def sharded_weight(name: str, parameter: DTensor, dtype: torch.dtype) -> Weight:
    """A parameter that is cut along its rows over all ranks, given out in ``dtype``."""
    shard, ranks = parameter.detach().to_local(), parameter.device_mesh.size()

    def parts(start: int, stop: int) -> Iterator[Part]:
        for rank, own, place in held_rows(len(parameter), ranks, start, stop):
            yield Part(rank, (place,), lambda own=own: shard[own])

    return Weight(name, tuple(parameter.shape), dtype, shard.device, parts)


def _like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """This rank's part of a tensor that is sharded as ``parameter`` is: the same memory."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class FSDP2Backend(FSDP2Model):
    """A policy: the whole of ``TrainBackend``."""

    module = ActionPolicy

    def action_logprobs(
        self, micro_batch: MicroBatch, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.root(micro_batch.to(self.device), distribution)

    def routing(self) -> tuple[Choice, ...]:
        return tuple(router.choice for router in self.routers)


class FSDP2Critic(FSDP2Model):
    """A critic on the backbone of ``checkpoint``."""

    module = ValueModel

    def values(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Values ``[N]`` float32 before the action tokens of ``micro_batch``, differentiable."""
        return self.root(micro_batch.to(self.device))
