"""The one place that knows how expert weights are laid out on disk.

In memory (transformers) an expert's projections are ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``: rows are outputs,
as in ``nn.Linear``. Published Qwen3-VL-MoE checkpoints, and the loaders that read them (vLLM), hold both transposed:
``[E, H, 2I]`` and ``[E, I, H]``. Names are the same in both, so nothing but the shape tells them apart, and nothing at all
where H equals 2I or I. Hence one rule: the in-memory layout everywhere in this project, the published one only in files
and on the way to the engine, converted by these two functions and by nothing else.
"""

from __future__ import annotations

import torch

_TRANSPOSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


def is_fused_expert(name: str) -> bool:
    """True for the weights whose published layout differs from the one in memory."""
    return name.endswith(_TRANSPOSED)


def to_published(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """In-memory layout to published layout; a contiguous tensor where they differ, ``tensor`` itself elsewhere."""
    return _transpose_experts(name, tensor)


def from_published(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Published layout to in-memory layout: the inverse of ``to_published``."""
    return _transpose_experts(name, tensor)


def _transpose_experts(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not is_fused_expert(name):
        return tensor
    if tensor.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; fused expert weights have three dimensions, experts first"
        )
    return tensor.transpose(1, 2).contiguous()


def check_layout_is_decidable(hidden_size: int, expert_size: int) -> None:
    """Raise ValueError where the shape cannot tell the two layouts apart (transformers' loader decides by shape)."""
    if hidden_size in (expert_size, 2 * expert_size):
        raise ValueError(
            f"hidden size {hidden_size} equals the expert size {expert_size} or twice it: the two checkpoint layouts have the "
            "same shape and a wrong one would load in silence; choose another moe_intermediate_size"
        )
