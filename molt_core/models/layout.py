"""The one place that knows the model types: where a type keeps its modules, and how its experts lie in its published files.

In memory (transformers) a layer's experts are two stacked tensors, ``gate_up_proj [E, 2I, H]``, gate rows before up rows, and
``down_proj [E, H, I]``: rows are outputs, as in ``nn.Linear``. Published files, and the loaders that read them (vLLM), hold

    stacked     the same two under the same names, each transposed: ``[E, H, 2I]`` and ``[E, I, H]``       Qwen3-VL-MoE
    separate    a tensor an expert and projection, ``experts.7.gate_proj.weight [I, H]``, ``up``, ``down``      Qwen3-MoE

Of a stacked tensor nothing but the shape tells which way it lies, and nothing at all where H equals 2I or I. Hence one rule:
the layout in memory everywhere in this project, the published one only in files and for vLLM's loader, converted by
``Architecture.published`` and by nothing else. Back from files it is transformers' own loader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

_IN_MEMORY = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
_SEPARATE = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")
_PROJECTIONS = {"gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True)
class Architecture:
    """A model type that trainers, collation and engine agree about. ``decoder`` and ``vision`` name modules of a policy."""

    model_type: str
    loader: str
    """transformers' class that loads it."""
    decoder: str
    """Has the ``layers``."""
    vision: str | None
    """Has the ``blocks``; None: it reads text alone."""
    experts: Literal["stacked", "separate"]
    """In published files."""

    @classmethod
    def of(cls, folder: Path) -> Architecture:
        """By the config.json of ``folder``. Raises ValueError for a type that is not known here."""
        described = json.loads((Path(folder) / "config.json").read_text())
        found = ARCHITECTURES.get(described.get("model_type"))
        if found is None:
            raise ValueError(
                f"model.path: {folder} holds a {described.get('model_type')!r} model {described.get('architectures', [])}; "
                f"supported are checkpoints of model_type {' or '.join(map(repr, ARCHITECTURES))}"
            )
        return found

    def published(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors in memory to those of published files: experts are views, all others themselves."""
        for name, tensor in weights:
            expert = _IN_MEMORY.fullmatch(name)
            if expert is None:
                yield name, tensor
                continue
            if tensor.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; stacked experts have three dimensions, experts first"
                )
            if self.experts == "stacked":
                yield name, tensor.transpose(1, 2)
                continue
            projections = _PROJECTIONS[expert[2]]
            for number, matrix in enumerate(tensor):
                for projection, part in zip(projections, matrix.chunk(len(projections))):
                    yield f"{expert[1]}.{number}.{projection}_proj.weight", part

    def check_files(self, shapes: Mapping[str, tuple[int, ...]], hidden: int, where: Path) -> None:
        """Raise ValueError unless experts in files of these tensors (name to shape) lie as published; hidden: H.

        Of the other layouts of Qwen3-VL-MoE transformers reads one (its own, of memory) and vLLM another (separate).
        """
        for name, shape in shapes.items():
            stacked = _IN_MEMORY.fullmatch(name)
            if not stacked and not _SEPARATE.fullmatch(name):
                continue
            width = shape[1] if stacked and stacked[2] == "gate_up" else shape[-1]
            if (self.experts == "stacked") != bool(stacked) or (stacked and width != hidden):
                lie = {
                    "stacked": "stacked, ...experts.gate_up_proj [E, H, 2I] and down_proj [E, I, H]",
                    "separate": "one by one, ...experts.0.gate_proj.weight [I, H], up_proj and down_proj",
                }[self.experts]
                raise ValueError(
                    f"model.path: {where} holds {name} {list(shape)}; supported are files as published, which for "
                    f"{self.model_type} have experts {lie} (H is {hidden}): convert them"
                )


def names_in_memory(published: Iterable[str]) -> frozenset[str]:
    """Names in published files, of whichever layout, to those in memory."""
    found = set()
    for name in published:
        separate = _SEPARATE.fullmatch(name)
        stacked = separate and next(s for s, parts in _PROJECTIONS.items() if separate[2] in parts)
        found.add(f"{separate[1]}.{stacked}_proj" if separate else name)
    return frozenset(found)


ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture(
            model_type="qwen3_vl_moe",
            loader="AutoModelForImageTextToText",
            decoder="model.language_model",
            vision="model.visual",
            experts="stacked",
        ),
        Architecture(
            model_type="qwen3_moe",
            loader="AutoModelForCausalLM",
            decoder="model",
            vision=None,
            experts="separate",
        ),
    )
}


def _of(policy: nn.Module) -> Architecture:
    return ARCHITECTURES[policy.config.model_type]


def decoder_of(policy: nn.Module) -> nn.Module:
    """The text decoder of a transformers ``policy``."""
    return policy.get_submodule(_of(policy).decoder)


def vision_of(policy: nn.Module) -> nn.Module | None:
    """Its vision tower, None where it has none."""
    name = _of(policy).vision
    return None if name is None else policy.get_submodule(name)


def layers_of(policy: nn.Module) -> tuple[nn.Module, ...]:
    """Blocks of its vision tower, then layers of its decoder: what is sharded and computed again one by one."""
    vision = vision_of(policy)
    return (*(() if vision is None else vision.blocks), *decoder_of(policy).layers)


def check_layout_is_decidable(hidden_size: int, expert_size: int) -> None:
    """Raise ValueError where no shape tells which way stacked experts lie (transformers' loader decides by it)."""
    if hidden_size in (expert_size, 2 * expert_size):
        raise ValueError(
            f"hidden size {hidden_size} equals the expert size {expert_size} or twice it: the two checkpoint layouts have the "
            "same shape and a wrong one would load in silence; choose another moe_intermediate_size"
        )
