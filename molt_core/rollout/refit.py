"""Weights on the wire: from the trainer's rank 0 to every engine worker, in buckets, over one process group.

A bucket is a flat byte buffer with some tensors, or some rows of one that is larger than a bucket, and a checksum. Its
description goes through the engine's control plane, its bytes through ``broadcast`` (gloo between CPUs, NCCL between GPUs),
so no weight passes through a file. Rows go from the shards that hold them straight into the one bucket that rank 0 has, so no
trainer rank ever holds a tensor beyond a bucket (or one row, where that is larger). Dtypes stay what they were; names and
layout are those in memory (``models/layout.py``). The engine's end is ``arrival.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from molt_core.models.layout import names_in_memory
from molt_core.train.weights import BUCKET_BYTES, Rows, Weight, collect

ALIGNMENT = 16
CHECKSUM_ROW = 2**13
OUTPUT_LAYER = "lm_head.weight"


class RefitError(RuntimeError):
    """Weights that arrived wrong, incomplete or not at all; the message names the tensor or the bucket."""


@dataclass(frozen=True)
class TensorSlot:
    """Where rows ``start`` to ``stop`` of a tensor lie in a bucket: from byte ``offset`` on.

    ``dtype`` is torch's name for it, e.g. "float32"; ``shape`` is the whole tensor's.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @classmethod
    def of(cls, rows: Rows, offset: int) -> TensorSlot:
        weight = rows.weight
        dtype = str(weight.dtype).removeprefix("torch.")
        return cls(weight.name, dtype, weight.shape, rows.start, rows.stop, offset)

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.shape[0]

    @property
    def end(self) -> int:
        elements = (self.stop - self.start) * math.prod(self.shape[1:])
        return self.offset + elements * getattr(torch, self.dtype).itemsize

    def of_bucket(self, buffer: torch.Tensor) -> torch.Tensor:
        """The rows, a view of the bucket's bytes."""
        raw = buffer[self.offset : self.end].view(getattr(torch, self.dtype))
        return raw.view(self.stop - self.start, *self.shape[1:])


@dataclass(frozen=True)
class RefitReport:
    """One transfer: ``tensors`` sent, ``bytes`` on the wire per engine worker."""

    tensors: int
    bytes: int


def checkpoint_names(folder: Path) -> frozenset[str]:
    """Names in memory of the tensors in a checkpoint folder: what a refit has to bring, no more and no less.

    An output layer that is tied to the embedding is the embedding, and comes once, also where the folder holds it twice.
    """
    names: set[str] = set()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names.update(handle.keys())
    config = json.loads((Path(folder) / "config.json").read_text())
    return names_in_memory(names - {OUTPUT_LAYER} if config.get("tie_word_embeddings") else names)


Bucket = list[tuple[Rows, TensorSlot]]


def buckets(weights: Iterable[Weight], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Divide weights, in order, into buckets of at most ``limit`` bytes; moves nothing.

    What fits into a bucket is never cut. What does not has buckets of its own, a slice each (``Weight.slices``), which an
    engine receives where the tensor is put together.
    """
    bucket: Bucket = []
    for weight in weights:
        slices = list(weight.slices(limit))
        offset = -(-bucket[-1][1].end // ALIGNMENT) * ALIGNMENT if bucket else 0
        if bucket and (len(slices) > 1 or offset + slices[0].bytes > limit):
            yield bucket
            bucket, offset = [], 0
        if len(slices) > 1:
            yield from ([(rows, TensorSlot.of(rows, 0))] for rows in slices)
        else:
            bucket.append((slices[0], TensorSlot.of(slices[0], offset)))
    if bucket:
        yield bucket


def checksum(buffer: torch.Tensor) -> int:
    """``sum_i (2 i + 1) x_i`` modulo 2^64 over the 64-bit words x of some bytes (zeros fill the last), on their device.

    Odd factors, so that any change of one word is seen; factors of the place, so that exchanged words are. Over rows of words
    that is a sum of their column sums and their row sums, which reads the bytes twice and writes nothing of their size.
    """
    if buffer.storage_offset() % 8:
        buffer = buffer.clone()
    last = buffer.new_zeros(8)
    last[: len(buffer) % 8] = buffer[len(buffer) // 8 * 8 :]
    words = buffer[: len(buffer) // 8 * 8].view(torch.int64)
    whole = len(words) // CHECKSUM_ROW * CHECKSUM_ROW
    rest = _weighed(words[whole:][None], whole) + _weighed(last.view(torch.int64)[None], len(words))
    return int(_weighed(words[:whole].view(-1, CHECKSUM_ROW), 0) + rest)


def _weighed(rows: torch.Tensor, first: int) -> torch.Tensor:
    """``sum_i (2 i + 1) x_i`` of the words in ``rows``, i counting from ``first``."""
    count, width = rows.shape
    sums, device = rows.sum(1), rows.device
    column = (rows.sum(0) * torch.arange(width, device=device)).sum()
    row = (sums * (first + width * torch.arange(count, device=device))).sum()
    return 2 * (column + row) + sums.sum()


def join_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """A process group apart from the trainer's own: rank 0 is the trainer, the others are engine workers."""
    prefixed, timeout = dist.PrefixStore("molt_refit", store), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    return dist.ProcessGroupGloo(prefixed, rank, size, timeout)


def broadcast(group: dist.ProcessGroup, buffer: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([buffer], options).wait()


def send(
    group: dist.ProcessGroup,
    weights: Sequence[Weight],
    announce: Callable[[dict], Callable[[], None]],
    expected_names: frozenset[str],
    limit: int = BUCKET_BYTES,
) -> RefitReport:
    """Rank 0: send all weights. ``announce(description)`` tells the engines about a bucket; returns a wait for their answer.

    Raises RefitError with the engines' own error where they have one, or with the names that were missing or unknown.
    """
    names: set[str] = set()
    total = 0
    planned = list(buckets(weights, limit))
    largest = max((bucket[-1][1].end for bucket in planned), default=0)
    memory = torch.empty(largest, dtype=torch.uint8, device=weights[0].device if weights else None)
    for bucket in planned:
        slots = [slot for _, slot in bucket]
        buffer = memory[: slots[-1].end]
        collect((rows, slot.of_bucket(buffer)) for rows, slot in bucket)
        wait = announce(
            {
                "slots": [vars(slot) for slot in slots],
                "size": buffer.numel(),
                "checksum": checksum(buffer),
            }
        )
        try:
            broadcast(group, buffer)
        except RuntimeError as error:
            wait()
            raise RefitError(f"sending a bucket of {len(slots)} tensors failed: {error}") from error
        wait()
        names.update(slot.name for slot in slots)
        total += buffer.numel()
    if names != expected_names:
        missing, unknown = sorted(expected_names - names), sorted(names - expected_names)
        raise RefitError(
            f"refit is not the whole checkpoint: missing {missing[:5]}, unknown {unknown[:5]}"
        )
    return RefitReport(len(names), total)


def take_part(weights: Sequence[Weight], limit: int = BUCKET_BYTES) -> None:
    """The other ranks: give rank 0, which is in ``send`` with the same weights, the rows that lie here."""
    for bucket in buckets(weights, limit):
        collect((rows, None) for rows, _ in bucket)
