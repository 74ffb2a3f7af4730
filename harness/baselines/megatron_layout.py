"""How a model is cut over ranks: which layouts exist, which are refused, and the ranks' groups.

Attention and embeddings are cut ``tensor_parallel`` ways; the remaining factor of the world holds different rows. Experts are
cut anew over the same ranks: ``expert_parallel`` ranks hold different experts, ``expert_tensor_parallel`` ranks parts of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class Layout:
    """Parallel degrees. Build with ``Layout.of``, which refuses what would not be exact."""

    tensor_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int

    @classmethod
    def of(cls, layout: Mapping[str, int], world_size: int, text) -> Layout:
        """From ``trainer.layout``, for the decoder ``text`` (Hugging Face text config). Raises ValueError.

        Missing degrees are 1, but ``expert_tensor_parallel`` follows ``tensor_parallel`` (Megatron's default).
        """
        known = [field.name for field in fields(cls)]
        for key, degree in layout.items():
            if key not in known:
                raise ValueError(f"trainer.layout.{key} is unknown to Megatron-Core; use {known}")
            if degree < 1:
                raise ValueError(f"trainer.layout.{key}: {degree} must be 1 or more")
        tensor = layout.get("tensor_parallel", 1)
        self = cls(
            tensor,
            layout.get("expert_parallel", 1),
            layout.get("expert_tensor_parallel", tensor),
        )
        if self.expert_parallel == 1 and self.expert_tensor_parallel != tensor:
            raise ValueError(
                f"trainer.layout: expert_parallel 1 with expert_tensor_parallel {self.expert_tensor_parallel} and "
                f"tensor_parallel {tensor} is refused: Megatron-Core then never sums the experts' gradients over the "
                "tensor-parallel ranks and their weights drift apart in silence; leave out expert_tensor_parallel, or raise "
                "expert_parallel"
            )
        expert_ranks = self.expert_parallel * self.expert_tensor_parallel
        for divisor, number, what in (
            (tensor, world_size, "trainer.world_size"),
            (expert_ranks, world_size, "trainer.world_size (by the experts' degrees)"),
            (tensor, text.num_key_value_heads, "the model's key-value heads"),
            (tensor, text.num_attention_heads, "the model's attention heads"),
            (tensor, text.vocab_size, "the model's vocabulary"),
            (self.expert_parallel, text.num_experts, "the model's experts"),
            (self.expert_tensor_parallel, text.moe_intermediate_size, "the model's expert size"),
        ):
            if number % divisor:
                raise ValueError(
                    f"trainer.layout {asdict(self)}: {what}, {number}, cannot be cut {divisor} ways; choose degrees that "
                    "divide it"
                )
        return self

    def join(self) -> Cuts:
        """Make Megatron's process groups (once a process) and return this rank's place in them. Collective."""
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=self.tensor_parallel,
                expert_model_parallel_size=self.expert_parallel,
                expert_tensor_parallel_size=self.expert_tensor_parallel,
                create_gloo_process_groups=False,
            )
        groups = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, tuple(group.rank() for group in groups))
        cuts = Cuts(*map(Cut, groups), places=tuple(places))
        made = Layout(cuts.tensor.size, cuts.expert.size, cuts.expert_tensor.size)
        if made != self:
            raise ValueError(
                f"this process was laid out as {asdict(made)} before and cannot become {asdict(self)}; start another process"
            )
        return cuts


@dataclass(frozen=True)
class Cut:
    """One way of cutting a tensor: over the ranks of ``group``."""

    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.group.size()

    def part(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        return tensor.chunk(self.size, dimension)[self.group.rank()]

    def whole(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """The whole tensor, from every rank's part. Collective."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dimension)


@dataclass(frozen=True)
class Cuts:
    """The three ways in which this rank's weights are cut. places: which part of each every rank has, in their order."""

    tensor: Cut
    expert: Cut
    expert_tensor: Cut
    places: tuple[tuple[int, int, int], ...]

    def holder(self, tensor: int) -> int:
        """First rank that has this part of what is cut over the tensor-parallel ranks."""
        return next(rank for rank, place in enumerate(self.places) if place[0] == tensor)

    def expert_holder(self, expert: int, expert_tensor: int) -> int:
        """First rank that has this part of these experts."""
        part = (expert, expert_tensor)
        return next(rank for rank, place in enumerate(self.places) if place[1:] == part)
