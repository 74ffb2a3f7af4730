"""Trajectories to tensors: rows laid end to end without padding for the model, flat action tokens for the loss.

No row is padded: a micro-batch is one line of tokens, and attention knows where each row begins (``train/attention.py``).
Rows of equal length lie side by side, so that they can be attended to together. The loss sees only sampled tokens: ``N`` of
them in one flat axis, in the order of the rows that were given, so there is no masked place at which a NaN could hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from molt_core.types import NOT_SAMPLED, ImageInput, Trajectory

Blocks = tuple[tuple[int, int], ...]
"""(rows, tokens of each) of the stretches of equally long rows, in the order in which they lie."""


@dataclass
class MicroBatch:
    """R rows of T tokens together, and their N action tokens in row order.

    token_ids ``[T]`` int64; position_ids ``[3, T]`` int64 (time, height, width); blocks: see ``Blocks``; row_starts ``[R]``
    int64, where each row begins, in the order in which rows were given; routed_experts ``[T, layers, k]`` int64, -1 where a
    token has no record, or None where none has.

    Of the distinct images (the samples of a prompt share theirs), None without images: patches ``[P, patch_dim]`` float32;
    grid_thw ``[images, 3]`` int64; image_positions and feature_index ``[placeholders]`` int64, the position of each
    placeholder, rising, and which of the merged features fills it.

    Of the action tokens, all ``[N]``: action_rows (of the rows as given), action_positions (of 0..T-1) and action_ids int64,
    behaviour_logprobs and advantages float32.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    blocks: Blocks
    row_starts: torch.Tensor
    routed_experts: torch.Tensor | None
    patches: torch.Tensor | None
    grid_thw: torch.Tensor | None
    image_positions: torch.Tensor | None
    feature_index: torch.Tensor | None
    action_rows: torch.Tensor
    action_positions: torch.Tensor
    action_ids: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor

    @property
    def tokens_forward(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors)


def collate(
    rows: Sequence[Trajectory],
    advantages: Sequence[np.ndarray] | None = None,
    *,
    merge_size: int = 2,
) -> MicroBatch:
    """Lay ``rows`` end to end, the shortest first.

    advantages: arrays that together hold the ``action_tokens`` values of all rows, in order; zeros where None. merge_size:
    patches a side that become one token.
    """
    lengths = np.array([len(row.token_ids) for row in rows])
    order = np.argsort(lengths, kind="stable")
    laid = [rows[i] for i in order]
    ends = np.cumsum(lengths[order])
    starts = np.empty_like(ends)
    starts[order] = ends - lengths[order]
    columns = [np.flatnonzero(row.action_mask) for row in rows]
    action_rows = np.repeat(np.arange(len(rows)), [len(c) for c in columns])
    positions = np.concatenate(columns) + starts[action_rows]
    token_ids = np.concatenate([row.token_ids for row in laid]).astype(np.int64)
    behaviour = np.concatenate([row.logprobs[row.action_mask] for row in rows])
    flat = np.zeros(len(positions)) if advantages is None else np.concatenate(list(advantages))
    mrope = [mrope_positions(len(row.token_ids), row.images, merge_size) for row in laid]
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.concatenate(mrope, axis=1)),
        blocks=tuple((int(n), int(t)) for t, n in zip(*np.unique(lengths, return_counts=True))),
        row_starts=torch.from_numpy(starts),
        routed_experts=_routed_experts(laid),
        **_images(laid, ends - lengths[order]),
        action_rows=torch.from_numpy(action_rows),
        action_positions=torch.from_numpy(positions),
        action_ids=torch.from_numpy(token_ids[positions]),
        behaviour_logprobs=torch.from_numpy(behaviour.astype(np.float32)),
        advantages=torch.from_numpy(flat.astype(np.float32)),
    )


def _images(rows: Sequence[Trajectory], starts: np.ndarray) -> dict[str, torch.Tensor | None]:
    """The image fields of a MicroBatch of ``rows`` in the order in which they lie."""
    places = [(start, image) for start, row in zip(starts, rows) for image in row.images]
    if not places:
        return dict.fromkeys(("patches", "grid_thw", "image_positions", "feature_index"))
    # Samples of a prompt have the same patches, whatever became of the objects that hold them on the way.
    images = {id(image.patches): image for _, image in places}
    first_feature = dict(zip(images, np.cumsum([0, *(i.length for i in images.values())]).tolist()))
    spans = [np.arange(image.length) for _, image in places]
    return {
        "patches": torch.from_numpy(np.concatenate([i.patches for i in images.values()])),
        "grid_thw": torch.tensor([image.grid_thw for image in images.values()]),
        "image_positions": torch.from_numpy(
            np.concatenate([start + i.start + span for (start, i), span in zip(places, spans)])
        ),
        "feature_index": torch.from_numpy(
            np.concatenate(
                [first_feature[id(i.patches)] + span for (_, i), span in zip(places, spans)]
            )
        ),
    }


def _routed_experts(rows: Sequence[Trajectory]) -> torch.Tensor | None:
    records = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not records:
        return None
    absent = records[0].shape[1:]
    return torch.from_numpy(
        np.concatenate(
            [
                np.full((len(row.token_ids), *absent), NOT_SAMPLED)
                if row.routed_experts is None
                else row.routed_experts
                for row in rows
            ]
        ).astype(np.int64)
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
        grid = np.indices((time, height, width)).reshape(3, -1)
        cursor = image.start + image.length
        out[:, image.start : cursor] = position + grid
        position += max(height, width)
    out[:, cursor:] = position + np.arange(length - cursor)
    return out
