"""The engine's end of a refit, without the engine: buckets come in, whole tensors go out, each checked and named.

A tensor that comes in slices is received straight into its place in one buffer, one such tensor at a time. So it becomes whole
in the engine's worker, whose loader takes whole tensors and needs that memory, and never on a rank of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from molt_core.rollout.refit import RefitError, TensorSlot, checksum


@dataclass(frozen=True)
class Sent:
    """What arrived under a name, to be found again in the engine."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sent:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return cls(tuple(tensor.shape), tensor.dtype, checksum(raw))


class Arrival:
    """One refit as it comes in. ``sent``: what has arrived whole, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sent: dict[str, Sent] = {}
        self._last: TensorSlot | None = None  # slice of the tensor that is not whole yet
        self._whole: torch.Tensor | None = None

    def buffer(self, slots: Sequence[TensorSlot], size: int) -> torch.Tensor:
        """Memory for the bytes of a bucket: the place of a slice that is due, else memory of their own."""
        slot = slots[0]
        if slot.is_whole or not self._is_due(slot):
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        if slot.start == 0:
            dtype = getattr(torch, slot.dtype)
            self._whole = torch.empty(slot.shape, dtype=dtype, device=self.device)
        return self._whole[slot.start : slot.stop].view(-1).view(torch.uint8)

    def take(
        self, slots: Sequence[TensorSlot], buffer: torch.Tensor, expected_checksum: int
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors that a bucket has made whole, from its filled ``buffer``.

        Raises RefitError that names what is changed, came twice, or came before all rows of another tensor had.
        """
        if checksum(buffer) != expected_checksum:
            raise RefitError(
                f"{_range(slots[0])} .. {_range(slots[-1])} came with a wrong checksum"
            )
        complete = []
        for slot in slots:
            if not self._is_due(slot):
                due = f"row {self._last.stop} of {self._last.name}" if self._last else "row 0"
                raise RefitError(f"{due} was due, but {_range(slot)} came")
            if slot.name in self.sent:
                raise RefitError(f"{slot.name} came twice")
            if slot.stop < slot.shape[0]:
                self._last = slot
                continue
            tensor = slot.of_bucket(buffer) if slot.is_whole else self._whole
            self._last = self._whole = None
            self.sent[slot.name] = Sent.of(tensor)
            complete.append((slot.name, tensor))
        return complete

    def finish(self) -> None:
        """Raises RefitError that names a tensor of which rows never came."""
        if self._last is not None:
            raise RefitError(
                f"the refit ended before row {self._last.stop} of {self._last.shape[0]} of {self._last.name} came"
            )

    def _is_due(self, slot: TensorSlot) -> bool:
        if self._last is None:
            return slot.start == 0
        due = (self._last.name, self._last.shape, self._last.dtype, self._last.stop)
        return (slot.name, slot.shape, slot.dtype, slot.start) == due


def _range(slot: TensorSlot) -> str:
    return slot.name if slot.is_whole else f"rows {slot.start} to {slot.stop} of {slot.name}"


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
