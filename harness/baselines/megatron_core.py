"""The baseline trainer: Megatron-Core's model, DistributedDataParallel and DistributedOptimizer as a TrainBackend.

    trainer:
      backend: harness.baselines.megatron_core:MegatronCoreBackend
      layout: {tensor_parallel: 2, expert_parallel: 2, expert_tensor_parallel: 1}

What this project adds to Megatron-Core is in ``megatron_model`` (vision, multimodal RoPE), ``megatron_weights`` (names, cuts),
``megatron_state`` (checkpoints), ``megatron_layout`` (what is refused) and, without a GPU only, ``megatron_cpu``. The layers
are those of Megatron's local specification on every device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    model_parallel_cuda_manual_seed,
    param_is_not_tensor_parallel_duplicate,
)

from harness.baselines import megatron_cpu
from harness.baselines.megatron_layout import Layout
from harness.baselines.megatron_model import (
    MegatronPolicy,
    check_supported,
    transformer_config,
)
from harness.baselines.megatron_state import OptimizerState
from harness.baselines.megatron_weights import Same, load_weights, weight_entries
from molt_core.config import ModelConfig, OptimizerConfig, TrainerConfig
from molt_core.models.layout import Architecture, vision_of
from molt_core.models.load import load_policy
from molt_core.train.backend import can_step
from molt_core.train.collate import MicroBatch
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.optimizer import decays, lr_factor, squared_update_and_weight
from molt_core.train.routing import Choice
from molt_core.train.weights import Weight


class MegatronCoreBackend:
    """See ``TrainBackend``. ``trainer.layout``: see ``megatron_layout.Layout``."""

    def __init__(
        self,
        checkpoint: Path,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        total_steps: int,
    ) -> None:
        self.device = torch.device(trainer.device)
        on_cpu = self.device.type == "cpu"
        self._in_optimizer = megatron_cpu.cuda_type_names if on_cpu else contextlib.nullcontext
        dtype = getattr(torch, model.dtype)
        policy = load_policy(checkpoint, dtype)
        check_supported(policy.config)
        text, visual = policy.config.get_text_config(), vision_of(policy)
        layout = Layout.of(trainer.layout, dist.get_world_size(), text)
        if on_cpu:
            megatron_cpu.install()
        cuts = layout.join()
        if not on_cpu:
            model_parallel_cuda_manual_seed(0)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        self._optimizer_config, self._total_steps, self._steps = optimizer, total_steps, 0

        config = transformer_config(text, layout, dtype, trainer.device)
        self.model = MegatronPolicy(config, text, visual, model.routing_replay)
        for layer in self.model.language_model.decoder.layers:
            layer.checkpointed = trainer.activation_checkpointing
        if trainer.activation_checkpointing and visual is not None:
            visual.gradient_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        self.model.to(self.device).train()  # the rotary frequencies stay float32 in every precision
        for router in self.model.routers:
            router.weight.requires_grad_(not optimizer.freeze_router)
        self._entries = weight_entries(self.model, Architecture.of(checkpoint), text, cuts)
        load_weights(self._entries, dict(policy.named_parameters()))
        whole = [entry for entry in self._entries if isinstance(entry, Same)]
        self.frozen = frozenset(e.names[0] for e in whole if not e.parameter.requires_grad)
        if not total_steps:  # scored alone: no gradient buffers, no optimiser and no second copy of the weights in it
            self.ddp = self.model.requires_grad_(False)
            return
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=self.data_size > 1,
                overlap_param_gather=self.data_size > 1,
            ),
            self.model,
        )
        self.optimizer = self._build_optimizer(optimizer, dtype)
        self._state = OptimizerState(self.optimizer.chained_optimizers)
        self._checkpoint_group = dist.new_group(backend="gloo")

    def _build_optimizer(self, optimizer: OptimizerConfig, dtype: torch.dtype):
        config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=self.data_size > 1,
        )
        undecayed = ParamPredicate("undecayed", lambda p: not decays(p.dim(), optimizer))
        with self._in_optimizer():
            return get_megatron_optimizer(
                config,
                [self.ddp],
                config_overrides={ParamKey(predicate=undecayed): {"wd_mult": 0.0}},
                use_gloo_process_groups=False,
            )

    def action_logprobs(
        self, micro_batch: MicroBatch, distribution: ActionDistribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._length = micro_batch.tokens_forward
        return self.ddp(micro_batch.to(self.device), distribution)

    @torch.no_grad()
    def routing(self) -> tuple[Choice, ...]:
        return tuple(self._of_all_tokens(router.choice) for router in self.model.routers)

    def _of_all_tokens(self, choice: Choice) -> Choice:
        """Sequence-parallel ranks see a part of the tokens each; padding is left out."""
        fields = {name: getattr(choice, name).contiguous() for name in ("natural", "chosen", "gap")}
        if self.model.config.sequence_parallel:
            fields = {n: gather_from_sequence_parallel_region(t) for n, t in fields.items()}
        return replace(choice, **{n: t[: self._length] for n, t in fields.items()})

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        with contextlib.nullcontext() if is_last else self.ddp.no_sync():
            loss.backward()
        if is_last:
            finalize_model_grads([self.ddp])

    def optimizer_step(self, apply: bool = True) -> float:
        factor = lr_factor(self._steps, self._total_steps, self._optimizer_config)
        for group in self.optimizer.param_groups:
            group["lr"] = self._optimizer_config.lr * factor
            group["weight_decay"] = group_weight_decay(group, self._optimizer_config)
        # Megatron's own step in its parts: the norm decides whether to step, and is worked out once.
        with self._in_optimizer():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if apply and can_step(norm):
                self._clip(norm)
                self.optimizer.step_with_ready_grads()
                self._steps += 1
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        return norm

    def _clip(self, norm: float) -> None:
        for part in self.optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(),
                    max_norm=self._optimizer_config.clip_norm,
                    total_norm=norm,
                )

    def update_ratio(self) -> float:
        squares = sum(
            squared_update_and_weight(part.optimizer, param_is_not_tensor_parallel_duplicate)
            for part in self.optimizer.chained_optimizers
        ).to(self.device)
        dist.all_reduce(squares)  # every part of a weight is stepped by one rank
        return float((squares[0] / squares[1]).sqrt())

    def weights(self, leave_out: frozenset[str] = frozenset()) -> Sequence[Weight]:
        # Stepped parts are gathered by the next forward, which may not have been yet.
        self.ddp.start_param_sync(force_sync=True)
        return [
            weight
            for entry in self._entries
            for weight in entry.weights()
            if weight.name not in leave_out
        ]

    @torch.no_grad()
    def save(self, folder: Path) -> Future:
        return self._state.save(self._entries, self._steps, folder, self._checkpoint_group)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self._steps = self._state.load(self._entries, folder)
        self.ddp.start_param_sync(force_sync=True)


def group_weight_decay(group: dict, config: OptimizerConfig) -> float:
    """Megatron applies ``wd_mult`` in its own scheduler only; without this, norms and biases would be decayed too."""
    return config.weight_decay * group["wd_mult"]
