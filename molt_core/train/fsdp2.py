"""The FSDP2 backend: a transformers model, sharded with ``fully_shard``, stepped with AdamW.

Each decoder layer and vision block is one sharding unit, the rest (embedding, norms, output layer) the root's. Gradients are
summed, not averaged, over the ranks, because the loss is divided by the global denominator already. Weights, optimiser state
and reductions are float32; the forward pass computes in ``model.dtype``, which is also what the engine receives.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from molt_core.train.collate import MicroBatch
from molt_core.train.optimizer import decays, lr_factor

PREFIX = "policy."


class ActionHead(nn.Module):
    """A policy whose forward gives logits at the predicting positions only. The root sharding unit."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        mask = batch.attention_mask
        right_padded = bool((mask[:, :-1] >= mask[:, 1:]).all())
        has_images = batch.patches is not None
        visual = self.policy.model.visual
        patches, grid = (
            (batch.patches, batch.grid_thw) if has_images else _blank_image(visual, mask.device)
        )
        features = visual(patches.type(visual.dtype), grid_thw=grid, return_dict=True)
        outputs = (features.pooler_output, *features.deepstack_features)
        if has_images:
            pooled, *deepstack = ([output[batch.feature_index]] for output in outputs)
            features.pooler_output, features.deepstack_features = pooled, deepstack
        hidden = self.policy.model(
            input_ids=batch.token_ids,
            # Behind a right-padded row's last token there is nothing that an action could attend to: plain causal attention.
            attention_mask=None if right_padded else mask.long(),
            position_ids=batch.position_ids,
            mm_encoder_outputs={"image": features} if has_images else None,
            use_cache=False,
        ).last_hidden_state
        logits = self.policy.lm_head(hidden[batch.action_rows, batch.action_columns - 1]).float()
        if not has_images:
            # The vision tower took part, so that its gradients are zero and not missing and ranks agree on their collectives.
            logits = logits + 0.0 * sum(output.sum() for output in outputs).float()
        return logits


def _blank_image(visual: nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    config = visual.config
    side = config.spatial_merge_size
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return (
        torch.zeros(side * side, width, device=device),
        torch.tensor([[1, side, side]], device=device),
    )


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
        self._router_logits: list[torch.Tensor] = []
        self._top_k = policy.config.text_config.num_experts_per_tok
        for module in policy.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._keep_router_logits)
        mesh = init_device_mesh(trainer.device, (self.data_size,))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for unit in (*policy.model.visual.blocks, *policy.model.language_model.layers):
            fully_shard(unit, mesh=mesh, mp_policy=precision)
        self.root = fully_shard(ActionHead(policy), mesh=mesh, mp_policy=precision)
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
        self._router_logits.append(output[0].detach())

    def action_logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        self._router_logits.clear()
        self._shape = tuple(micro_batch.token_ids.shape)
        return self.root(micro_batch.to(self.device))

    def router_gap(self) -> torch.Tensor | None:
        if not self._router_logits:
            return None
        gaps = []
        for logits in self._router_logits:
            best = logits.float().topk(self._top_k + 1, dim=-1).values
            gaps.append(best[:, -2] - best[:, -1])
        return torch.stack(gaps).amin(0).view(self._shape)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()  # reduced at once: unsharded gradients of the whole model would not fit a large one

    def optimizer_step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.root.parameters(), self.clip_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.root.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name.removeprefix(PREFIX), whole.to(self.dtype)

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder)

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
