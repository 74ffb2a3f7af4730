"""Trajectories to tensors: right-padded rows for the model, flat action tokens for the loss.

The loss sees only sampled tokens: ``N`` of them in one flat axis, each with its row, so there is no masked place at which a
NaN could hide and padding cannot change a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from molt_core.types import ImageInput, Trajectory


@dataclass
class MicroBatch:
    """B rows of at most T tokens, and their N action tokens in row order.

    token_ids ``[B, T]`` int64; attention_mask ``[B, T]`` bool; position_ids ``[3, B, T]`` int64 (time, height, width);
    image_mask ``[B, T]`` bool, True at image placeholders.

    Of the distinct images (the samples of a prompt share theirs), all three None without images: patches
    ``[P, patch_dim]`` float32; grid_thw ``[images, 3]`` int64; feature_index ``[placeholders]`` int64, which of the merged
    features fills each placeholder, placeholders in row order.

    Of the action tokens, all ``[N]``: action_rows, action_columns, action_ids int64, behaviour_logprobs float32,
    advantages float32.
    """

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    image_mask: torch.Tensor
    patches: torch.Tensor | None
    grid_thw: torch.Tensor | None
    feature_index: torch.Tensor | None
    action_rows: torch.Tensor
    action_columns: torch.Tensor
    action_ids: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor

    @property
    def tokens_forward(self) -> int:
        return int(self.attention_mask.sum())

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{k: None if v is None else v.to(device) for k, v in vars(self).items()})


def collate(
    rows: Sequence[Trajectory],
    advantages: Sequence[np.ndarray] | None = None,
    *,
    merge_size: int = 2,
    pad_to: int = 1,
) -> MicroBatch:
    """Pad ``rows`` on the right to one length (a multiple of ``pad_to``).

    advantages: arrays that together hold the ``action_tokens`` values of all rows, in order; zeros where None. merge_size:
    patches a side that become one token.
    """
    length = max(len(row.token_ids) for row in rows)
    length += -length % pad_to
    shape = (len(rows), length)
    token_ids, attention, image_mask = (
        np.zeros(shape, np.int64),
        np.zeros(shape, bool),
        np.zeros(shape, bool),
    )
    positions = np.zeros((3, *shape), np.int64)
    action_rows, action_columns = [], []
    for b, row in enumerate(rows):
        count = len(row.token_ids)
        token_ids[b, :count] = row.token_ids
        attention[b, :count] = True
        positions[:, b, :count] = mrope_positions(count, row.images, merge_size)
        for image in row.images:
            image_mask[b, image.start : image.start + image.length] = True
        columns = np.flatnonzero(row.action_mask)
        action_rows.append(np.full(len(columns), b))
        action_columns.append(columns)
    places = [image for row in rows for image in row.images]
    images = list({id(image): image for image in places}.values())
    first_feature = dict(
        zip(map(id, images), np.cumsum([0, *(image.length for image in images)]).tolist())
    )
    rows_index, columns_index = np.concatenate(action_rows), np.concatenate(action_columns)
    behaviour = np.concatenate([row.logprobs[row.action_mask] for row in rows])
    flat = (
        np.zeros(len(rows_index), np.float32)
        if advantages is None
        else np.concatenate(list(advantages))
    )
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        attention_mask=torch.from_numpy(attention),
        position_ids=torch.from_numpy(positions),
        image_mask=torch.from_numpy(image_mask),
        patches=torch.from_numpy(np.concatenate([image.patches for image in images]))
        if images
        else None,
        grid_thw=torch.tensor([image.grid_thw for image in images]) if images else None,
        feature_index=torch.from_numpy(
            np.concatenate([first_feature[id(image)] + np.arange(image.length) for image in places])
        )
        if images
        else None,
        action_rows=torch.from_numpy(rows_index),
        action_columns=torch.from_numpy(columns_index),
        action_ids=torch.from_numpy(token_ids[rows_index, columns_index]),
        behaviour_logprobs=torch.from_numpy(behaviour.astype(np.float32)),
        advantages=torch.from_numpy(flat.astype(np.float32)),
    )


def mrope_positions(length: int, images: Sequence[ImageInput], merge_size: int) -> np.ndarray:
    """``[3, length]`` positions of multimodal RoPE (time, height, width), as Qwen3-VL assigns them.

    Text counts up alike on the three axes; an image's tokens share the time of its start and spread over its merged grid;
    the text after it goes on one past the largest position used (Qwen2-VL report, arXiv 2409.12191, section 2.1).
    """
    out = np.zeros((3, length), np.int64)
    cursor = position = 0
    for image in images:
        text = image.start - cursor
        out[:, cursor : image.start] = position + np.arange(text)
        position += text
        time, height, width = (
            image.grid_thw[0],
            image.grid_thw[1] // merge_size,
            image.grid_thw[2] // merge_size,
        )
        grid = np.stack(
            np.meshgrid(np.arange(time), np.arange(height), np.arange(width), indexing="ij")
        ).reshape(3, -1)
        cursor = image.start + image.length
        out[:, image.start : cursor] = position + grid
        position += max(height, width)
    out[:, cursor:] = position + np.arange(length - cursor)
    return out
