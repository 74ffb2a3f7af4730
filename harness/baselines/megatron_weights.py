"""Which Megatron parameter holds which Hugging Face tensor, both ways.

An entry knows the Hugging Face names, this rank's parameters, and how they are cut; ``parts`` cuts whole tensors into what
belongs to each parameter, ``whole`` gathers them again: weights, or whatever else has a parameter's shape, as a checkpoint
needs them. ``weights`` says which rank holds which rows, as a refit needs them. Names, shapes and layouts on the Hugging Face
side are those in memory: an expert's ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from harness.baselines.megatron_layout import Cuts
from harness.baselines.megatron_model import MegatronPolicy
from molt_core.models.layout import Architecture
from molt_core.train.weights import Part, Weight, held_rows

Tensors = Mapping[str, torch.Tensor]
Read = Callable[[nn.Parameter], torch.Tensor]
"""A tensor of the parameter's shape: its value, or a moment of it."""


class Entry(Protocol):
    names: tuple[str, ...]

    def parts(self, tensors: Tensors) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """This rank's parameters, each with its part of ``tensors`` (by name)."""
        ...

    def whole(self, read: Read = torch.Tensor.detach) -> Iterator[torch.Tensor]:
        """The tensors of ``names``, in that order, from what ``read`` gives of each parameter. Collective."""
        ...

    def weights(self) -> Iterator[Weight]:
        """The values of ``names``, in that order: where their rows lie. A rank holds no part that an earlier one holds."""
        ...


@dataclass(frozen=True)
class Same:
    """One tensor, one parameter; cut over the tensor-parallel ranks along ``dimension`` or, with None, alike on every rank."""

    names: tuple[str]
    parameter: nn.Parameter
    cuts: Cuts | None = None
    dimension: int = 0

    def parts(self, tensors: Tensors) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        tensor = tensors[self.names[0]]
        cut = self.cuts and self.cuts.tensor
        yield self.parameter, cut.part(tensor, self.dimension) if cut else tensor

    def whole(self, read: Read = torch.Tensor.detach) -> Iterator[torch.Tensor]:
        tensor, cut = read(self.parameter), self.cuts and self.cuts.tensor
        yield cut.whole(tensor, self.dimension) if cut else tensor

    def weights(self) -> Iterator[Weight]:
        own, shape = self.parameter.detach(), list(self.parameter.shape)
        ranks = self.cuts.tensor.size if self.cuts else 1
        shape[self.dimension] *= ranks

        def parts(start: int, stop: int) -> Iterator[Part]:
            if ranks == 1:
                yield Part(0, (), lambda: own[start:stop])
            elif self.dimension == 0:
                for part, rows, place in held_rows(shape[0], ranks, start, stop):
                    yield Part(self.cuts.holder(part), (place,), lambda rows=rows: own[rows])
            else:
                for part, columns in enumerate(_stretches(shape[1], ranks)):
                    place = (slice(None), columns)
                    yield Part(self.cuts.holder(part), place, lambda: own[start:stop])

        yield Weight(self.names[0], tuple(shape), own.dtype, own.device, parts)


@dataclass(frozen=True)
class QKV:
    """Three projections in one parameter: for each key-value head its query heads, then its key, then its value."""

    names: tuple[str, str, str]
    parameter: nn.Parameter
    cuts: Cuts
    groups: int
    queries_per_group: int
    head_dim: int

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.queries_per_group * self.head_dim, self.head_dim, self.head_dim

    def parts(self, tensors: Tensors) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        by_group = [
            tensors[name].unflatten(0, (self.groups, size))
            for name, size in zip(self.names, self._sizes)
        ]
        yield self.parameter, self.cuts.tensor.part(torch.cat(by_group, 1).flatten(0, 1), 0)

    def whole(self, read: Read = torch.Tensor.detach) -> Iterator[torch.Tensor]:
        fused = self.cuts.tensor.whole(read(self.parameter), 0).unflatten(0, (self.groups, -1))
        for part in fused.split(self._sizes, 1):
            yield part.flatten(0, 1)

    def weights(self) -> Iterator[Weight]:
        own, ranks, before = self.parameter.detach(), self.cuts.tensor.size, 0
        for name, size in zip(self.names, self._sizes):
            shape = (self.groups * size, *own.shape[1:])

            def parts(start, stop, size=size, before=before) -> Iterator[Part]:
                for part, rows, place in held_rows(self.groups * size, ranks, start, stop):
                    row = torch.arange(rows.start, rows.stop, device=own.device)
                    fused = row // size * sum(self._sizes) + before + row % size
                    yield Part(self.cuts.holder(part), (place,), lambda fused=fused: own[fused])

            yield Weight(name, shape, own.dtype, own.device, parts)
            before += size


@dataclass(frozen=True)
class Experts:
    """One stacked tensor, one parameter an expert of this rank; each expert may be cut once more along ``dimension``.

    halves: 2 where gate and up lie in one tensor, which are cut one by one, else 1.
    """

    names: tuple[str]
    parameters: tuple[nn.Parameter, ...]
    cuts: Cuts
    dimension: int
    halves: int

    def parts(self, tensors: Tensors) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        own = self.cuts.expert.part(tensors[self.names[0]], 0)
        for parameter, expert in zip(self.parameters, own):
            halves = [
                self.cuts.expert_tensor.part(half, self.dimension)
                for half in expert.chunk(self.halves, self.dimension)
            ]
            yield parameter, torch.cat(halves, self.dimension)

    def whole(self, read: Read = torch.Tensor.detach) -> Iterator[torch.Tensor]:
        own = torch.stack([read(parameter) for parameter in self.parameters])
        halves = [
            self.cuts.expert_tensor.whole(half, self.dimension + 1)
            for half in own.chunk(self.halves, self.dimension + 1)
        ]
        yield self.cuts.expert.whole(torch.cat(halves, self.dimension + 1), 0)

    def weights(self) -> Iterator[Weight]:
        own, dimension = [p.detach() for p in self.parameters], self.dimension
        ranks, cut = self.cuts.expert.size, self.cuts.expert_tensor.size
        shape = [len(own) * ranks, *own[0].shape]
        shape[dimension + 1] *= cut
        halves = self.halves if cut > 1 else 1  # uncut ones need not be told apart
        stretches = list(_stretches(shape[dimension + 1], halves * cut))
        kept = list(_stretches(own[0].shape[dimension], halves))

        def parts(start: int, stop: int) -> Iterator[Part]:
            for expert in range(start, stop):
                part, row = divmod(expert, len(own))
                for number, stretch in enumerate(stretches):
                    half, rank = divmod(number, cut)
                    inside = (slice(None),) * dimension
                    yield Part(
                        self.cuts.expert_holder(part, rank),
                        (slice(expert - start, expert - start + 1), *inside, stretch),
                        lambda at=(None, *inside, kept[half]), row=row: own[row][at],
                    )

        yield Weight(self.names[0], tuple(shape), own[0].dtype, own[0].device, parts)


def _stretches(length: int, number: int) -> Iterator[slice]:
    """``length`` in ``number`` equal stretches."""
    each = length // number
    return (slice(n * each, (n + 1) * each) for n in range(number))


def weight_entries(
    model: MegatronPolicy, architecture: Architecture, text, cuts: Cuts
) -> list[Entry]:
    """Entries of all parameters of ``model``; ``text`` is the Hugging Face text config."""
    decoder = model.language_model
    vision = () if model.visual is None else model.visual.named_parameters()
    entries: list[Entry] = [
        Same((f"{architecture.vision}.{name}",), parameter) for name, parameter in vision
    ]
    prefix = architecture.decoder
    entries.append(
        Same((f"{prefix}.embed_tokens.weight",), decoder.embedding.word_embeddings.weight, cuts)
    )
    for number, layer in enumerate(decoder.decoder.layers):
        here = f"{prefix}.layers.{number}"
        attention, moe = layer.self_attention, layer.mlp
        local = moe.experts.local_experts
        entries += [
            QKV(
                tuple(f"{here}.self_attn.{x}_proj.weight" for x in "qkv"),
                attention.linear_qkv.weight,
                cuts,
                text.num_key_value_heads,
                text.num_attention_heads // text.num_key_value_heads,
                text.head_dim,
            ),
            Same((f"{here}.self_attn.o_proj.weight",), attention.linear_proj.weight, cuts, 1),
            Same((f"{here}.self_attn.q_norm.weight",), attention.q_layernorm.weight),
            Same((f"{here}.self_attn.k_norm.weight",), attention.k_layernorm.weight),
            Same((f"{here}.input_layernorm.weight",), layer.input_layernorm.weight),
            Same((f"{here}.post_attention_layernorm.weight",), layer.pre_mlp_layernorm.weight),
            Same((f"{here}.mlp.gate.weight",), moe.router.weight),
            Experts(
                (f"{here}.mlp.experts.gate_up_proj",),
                tuple(expert.linear_fc1.weight for expert in local),
                cuts,
                dimension=0,
                halves=2,
            ),
            Experts(
                (f"{here}.mlp.experts.down_proj",),
                tuple(expert.linear_fc2.weight for expert in local),
                cuts,
                dimension=1,
                halves=1,
            ),
        ]
    entries.append(Same((f"{prefix}.norm.weight",), decoder.decoder.final_layernorm.weight))
    entries.append(Same(("lm_head.weight",), model.head.weight, cuts))
    return entries


@torch.no_grad()
def load_weights(entries: list[Entry], weights: Tensors) -> None:
    """Fill this rank's parameters. Raises ValueError unless entries and ``weights`` name the same tensors."""
    names = {name for entry in entries for name in entry.names}
    if names != set(weights):
        raise ValueError(
            f"the checkpoint and the Megatron-Core model differ in their tensors: {sorted(names ^ set(weights))}"
        )
    for entry in entries:
        for parameter, part in entry.parts(weights):
            parameter.copy_(part)
