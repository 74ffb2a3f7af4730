"""Causal attention over rows that lie end to end: no row sees another, and no padding is computed.

transformers finds packed rows from position ids only where it is given one-dimensional ones, and then builds a dense mask over
all pairs of tokens, whose cost is the square of the micro-batch. Here each stretch of equally long rows is one unmasked
call of torch's attention, which costs what the rows themselves cost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from molt_core.train.collate import Blocks

NAME = "rows_end_to_end"


def attention_of_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    blocks: Blocks,
    scaling: float,
    **_,
) -> tuple[torch.Tensor, None]:
    """query ``[1, heads, T, d]``, key and value ``[1, kv_heads, T, d]``; returns ``[1, T, heads, d]``, as transformers asks."""
    outputs, start = [], 0
    for rows, length in blocks:
        stop = start + rows * length
        parts = (
            tensor[0, :, start:stop].unflatten(1, (rows, length)).transpose(0, 1)
            for tensor in (query, key, value)
        )
        output = F.scaled_dot_product_attention(
            *parts, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start = stop
    return torch.cat(outputs)[None], None


AttentionInterface.register(NAME, attention_of_rows)
