"""A trainer's weights on their way out, some rows at a time: from the ranks that hold them to rank 0.

A backend says of each weight which rank holds which part of its rows (``Weight``); the moving is done here, once for all
backends. Rank 0 receives straight into the memory that it is given and the others send from their shards, so that no rank
holds more of a weight, beside its shard, than a bucket, or one row where a single row (an expert, where they are stacked) is
larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Part:
    """A part of some rows of a weight that lies on one rank.

    place: where in those rows it belongs, an index. read: its values in any dtype and memory format; called on ``rank`` alone.
    """

    rank: int
    place: tuple[slice, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Weight:
    """What a weight is, whole, and where its rows lie. It has at least one dimension, and a row is an index of the first.

    device: where rank 0 receives. ``parts(start, stop)``: the parts that make up these rows; the same list on every rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    parts: Callable[[int, int], Iterable[Part]]

    def slices(self, limit: int) -> Iterator[Rows]:
        """The whole weight, in slices of as many whole rows as ``limit`` bytes hold, and of one at least."""
        step = max(1, limit // Rows(self, 0, 1).bytes)
        for start in range(0, self.shape[0], step):
            yield Rows(self, start, min(start + step, self.shape[0]))


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop`` (exclusive) of a weight."""

    weight: Weight
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stop - self.start, *self.weight.shape[1:]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.weight.dtype.itemsize


def held_rows(rows: int, ranks: int, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """Who holds rows ``start`` to ``stop`` of ``rows`` that are cut over ``ranks`` as ``torch.chunk`` cuts, uneven ones too.

    Gives the number of the part, which of its own rows they are, and where these belong among the rows asked for.
    """
    each = math.ceil(rows / ranks)
    for number in range(start // each, math.ceil(stop / each)):
        first = number * each
        low, high = max(start, first), min(stop, first + each)
        yield number, slice(low - first, high - first), slice(low - start, high - start)


@torch.no_grad()
def collect(wanted: Iterable[tuple[Rows, torch.Tensor | None]]) -> None:
    """Bring rows to rank 0, each into its tensor there (of their shape, dtype and device); the others give None and send.

    Collective over those ranks that hold some of the rows: every rank asks for the same. A part whose place is not one stretch
    of memory (columns) is received beside it first.
    """
    transfers, beside = [], []
    for rows, into in wanted:
        for part in rows.weight.parts(rows.start, rows.stop):
            if into is None:
                if part.rank == dist.get_rank():
                    values = part.read().to(rows.weight.dtype).contiguous()
                    transfers.append(dist.P2POp(dist.isend, values, 0))
            elif part.rank == 0:
                into[part.place].copy_(part.read())
            else:
                place = into[part.place]
                received = place if place.is_contiguous() else place.new_empty(place.shape)
                transfers.append(dist.P2POp(dist.irecv, received, part.rank))
                if received is not place:
                    beside.append((place, received))
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
    for place, received in beside:
        place.copy_(received)


def whole_weights(
    weights: Sequence[Weight], limit: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """On rank 0 each weight whole, by name, in the CPU's memory, where it may be kept; on the others nothing.

    For files and comparisons. Collective: the other ranks must run through it too.
    """
    for weight in weights:
        whole = torch.empty(weight.shape, dtype=weight.dtype) if dist.get_rank() == 0 else None
        for rows in weight.slices(limit):
            if whole is None:
                collect([(rows, None)])
                continue
            place = whole[rows.start : rows.stop]
            on_cpu = weight.device.type == "cpu"
            received = place if on_cpu else torch.empty_like(place, device=weight.device)
            collect([(rows, received)])
            place.copy_(received)
        if whole is not None:
            yield weight.name, whole
