"""What Megatron's distributed optimiser holds, in and out of the form that all backends save (``molt_core/train/state.py``).

Each data-parallel rank has its stretch of a flat buffer of float32 weights and moments. For a checkpoint the stretches of one
parameter are put together, then its tensor-parallel and expert cuts (``megatron_weights``), and the whole tensor is kept by
one rank; the ranks take turns, so that each keeps its share of them. Hence any layout reads any other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from harness.baselines.megatron_weights import Entry
from molt_core.train.state import FIRST, KINDS, SECOND, WEIGHTS, SavedState, save_state

MEGATRON_NAMES = {WEIGHTS: "param", FIRST: "exp_avg", SECOND: "exp_avg_sq"}


class OptimizerState:
    """``parts``: one distributed optimiser for the dense parameters, one for the experts."""

    def __init__(self, parts: Sequence[DistributedOptimizer]) -> None:
        self._parts = parts
        self._part = {p: part for part in parts for buffer in part.buffers for p in buffer.params}

    def save(
        self, entries: Sequence[Entry], steps: int, folder: Path, group: dist.ProcessGroup
    ) -> Future:
        state = {kind: {} for kind in KINDS}
        turn = 0
        for kind in KINDS:
            for entry in entries:
                whole = entry.whole(lambda parameter, kind=kind: self._read(parameter, kind))
                for name, tensor in zip(entry.names, whole):
                    if turn % dist.get_world_size() == dist.get_rank():
                        state[kind][name] = tensor.cpu()
                    turn += 1
        return save_state(state, steps, folder, group)

    def load(self, entries: Sequence[Entry], folder: Path) -> int:
        """Fill weights and moments; returns the steps taken. Raises KeyError for a tensor that was not saved."""
        saved = SavedState(folder)
        steps = saved.steps
        for part in self._parts:
            part._init_optimizer_states_with_dummy_values()
            for group in part.optimizer.param_groups:
                if "step" in group:  # fused kernels count by group, torch by parameter
                    group["step"] = steps
        for entry in entries:
            by_kind = (
                entry.parts({name: saved.tensor(kind, name) for name in entry.names})
                for kind in KINDS
            )
            for parameter_and_parts in zip(*by_kind):
                parameter = parameter_and_parts[0][0]
                values = {
                    MEGATRON_NAMES[kind]: value
                    for kind, (_, value) in zip(KINDS, parameter_and_parts)
                }
                self._write(parameter, values, steps)
        for part in self._parts:
            part._copy_main_params_to_model_params()
        return steps

    def _read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """This rank's whole parameter, or its moment, float32. Collective over the data-parallel group."""
        part = self._part.get(parameter)
        if part is None:  # frozen, so in no optimiser and whole on every rank
            weight = parameter.detach().float()
            return weight if kind == WEIGHTS else torch.zeros_like(weight)
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if parameter in part.model_param_group_index_map:
            held = part._get_main_param_and_optimizer_states(parameter)
            place = part._get_model_param_range_map(parameter)["param"]
            if MEGATRON_NAMES[kind] in held:  # no moments before the first step
                whole[place.start : place.end] = held[MEGATRON_NAMES[kind]].detach().view(-1)
        dist.all_reduce(whole, group=part.data_parallel_group)
        return whole.view(parameter.shape)

    def _write(self, parameter: nn.Parameter, values: dict[str, torch.Tensor], steps: int) -> None:
        part = self._part.get(parameter)
        if part is None:
            parameter.copy_(values[MEGATRON_NAMES[WEIGHTS]])
            return
        if parameter not in part.model_param_group_index_map:
            return  # another data-parallel rank steps all of it
        place = part._get_model_param_range_map(parameter)["param"]
        own = {name: v.reshape(-1)[place.start : place.end] for name, v in values.items()}
        part._set_main_param_and_optimizer_states(
            parameter, {**own, "step": torch.tensor(float(steps))}
        )
