"""Weights on the wire: from the trainer's rank 0 to every engine worker, in buckets, over one process group.

A bucket is a flat byte buffer with the names, shapes and dtypes in it and a checksum. Its description goes through the
engine's control plane, its bytes through ``broadcast`` (gloo between CPUs, NCCL between GPUs), so no weight passes through a
file and at most one bucket is whole anywhere, or one tensor where that is larger than a bucket. Dtypes stay what they were;
names and layout are the published checkpoint's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

BUCKET_BYTES = 256 * 2**20
ALIGNMENT = 16
CHECKSUM_ROW = 2**13
OUTPUT_LAYER = "lm_head.weight"


class RefitError(RuntimeError):
    """Weights that arrived wrong, incomplete or not at all; the message names the tensor or the bucket."""


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor lies in a bucket. ``dtype`` is torch's name for it, e.g. "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class RefitReport:
    """One transfer: ``tensors`` sent, ``bytes`` on the wire per engine worker."""

    tensors: int
    bytes: int


def checkpoint_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in a checkpoint folder: what a refit has to bring, no more and no less.

    An output layer that is tied to the embedding is the embedding, and comes once, also where the folder holds it twice.
    """
    names: set[str] = set()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names.update(handle.keys())
    config = json.loads((Path(folder) / "config.json").read_text())
    return frozenset(names - {OUTPUT_LAYER} if config.get("tie_word_embeddings") else names)


def buckets(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int = BUCKET_BYTES
) -> Iterator[tuple[list[TensorSlot], torch.Tensor]]:
    """Pack tensors, in order, into uint8 buffers of at most ``limit`` bytes (a larger tensor has a bucket of its own)."""
    slots: list[TensorSlot] = []
    parts: list[torch.Tensor] = []
    offset = 0
    for name, tensor in weights:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        padding = -flat.numel() % ALIGNMENT
        if slots and offset + flat.numel() + padding > limit:
            yield slots, torch.cat(parts)
            slots, parts, offset = [], [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(TensorSlot(name, dtype, tuple(tensor.shape), offset, flat.numel()))
        parts += [flat, flat.new_zeros(padding)]
        offset += flat.numel() + padding
    if slots:
        yield slots, torch.cat(parts)


def unpack(slots: Sequence[TensorSlot], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, as views of ``buffer``."""
    for slot in slots:
        raw = buffer[slot.offset : slot.offset + slot.bytes]
        yield slot.name, raw.view(getattr(torch, slot.dtype)).view(slot.shape)


def checksum(buffer: torch.Tensor) -> int:
    """``sum_i (2 i + 1) x_i`` modulo 2^64 over a bucket's 64-bit words x, on whatever device it lies.

    Odd factors, so that any change of one word is seen; factors of the place, so that exchanged words are. Over rows of words
    that is a sum of their column sums and their row sums, which reads the bucket twice and writes nothing of its size.
    """
    words = buffer.view(torch.int64)
    whole = len(words) // CHECKSUM_ROW * CHECKSUM_ROW
    rest = _weighed(words[whole:][None], whole)
    return int(_weighed(words[:whole].view(-1, CHECKSUM_ROW), 0) + rest)


def _weighed(rows: torch.Tensor, first: int) -> torch.Tensor:
    """``sum_i (2 i + 1) x_i`` of the words in ``rows``, i counting from ``first``."""
    count, width = rows.shape
    sums, device = rows.sum(1), rows.device
    column = (rows.sum(0) * torch.arange(width, device=device)).sum()
    row = (sums * (first + width * torch.arange(count, device=device))).sum()
    return 2 * (column + row) + sums.sum()


@dataclass(frozen=True)
class Sent:
    """What arrived under a name, to be found again in the engine."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sent:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        padding = -raw.numel() % 8
        if padding or raw.storage_offset() % 8:
            raw = torch.cat([raw, raw.new_zeros(padding)])
        return cls(tuple(tensor.shape), tensor.dtype, checksum(raw))


def check_kept(
    sent: Mapping[str, Sent],
    kept: Mapping[str, torch.Tensor],
    engine_name: Callable[[str], str | None],
) -> int:
    """Compare each tensor with the engine's own, where it keeps it as it came; returns how many were compared.

    Fused, packed and cut tensors have another name or shape in the engine and are left to the probe. Raises RefitError that
    names a tensor which is not what was sent, or where nothing could be compared.
    """
    compared = 0
    for name, expected in sent.items():
        tensor = kept.get(engine_name(name))
        if tensor is None or (tuple(tensor.shape), tensor.dtype) != (
            expected.shape,
            expected.dtype,
        ):
            continue
        if Sent.of(tensor) != expected:
            raise RefitError(f"{name}: the engine holds another tensor than was sent")
        compared += 1
    if sent and not compared:
        raise RefitError(f"none of the {len(sent)} tensors sent is found in the engine")
    return compared


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
    weights: Iterable[tuple[str, torch.Tensor]],
    announce: Callable[[dict], Callable[[], None]],
    expected_names: frozenset[str],
) -> RefitReport:
    """Send all weights. ``announce(description)`` tells the engines about a bucket and returns a wait for their answer.

    Raises RefitError with the engines' own error where they have one, or with the names that were missing or unknown.
    """
    names: set[str] = set()
    total = 0
    for slots, buffer in buckets(weights):
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
