"""What an engine's worker makes of the buckets that come in: whole tensors, or an error that names the tensor."""

from dataclasses import replace

import pytest
import torch

from molt_core.rollout.arrival import Arrival, Sent, check_kept
from molt_core.rollout.refit import RefitError, TensorSlot, buckets, checksum
from molt_core.train.weights import collect
from tests.molt_core.make import weight

LIMIT = 48
TENSORS = {
    "norm": torch.arange(6.0),
    "embed": torch.arange(30, dtype=torch.bfloat16).view(
        10, 3
    ),  # 60 bytes, rows of 6: eight and two
    "bias": torch.arange(5.0),
    "experts": torch.arange(40.0).view(5, 2, 4),  # a row is 32 bytes
    "wide": torch.arange(26.0).view(2, 13),  # a row is larger than a bucket
}


Sending = tuple[list[TensorSlot], torch.Tensor]


def sending() -> list[Sending]:
    """The buckets of ``TENSORS``, with their bytes."""
    found = []
    for bucket in buckets([weight(*item) for item in TENSORS.items()], LIMIT):
        buffer = torch.zeros(bucket[-1][1].end, dtype=torch.uint8)
        collect((rows, slot.of_bucket(buffer)) for rows, slot in bucket)
        found.append(([slot for _, slot in bucket], buffer))
    return found


def receive(sent: list[Sending]) -> dict[str, torch.Tensor]:
    arrival, found = Arrival(torch.device("cpu")), {}
    for slots, buffer in sent:
        place = arrival.buffer(slots, len(buffer))
        place.copy_(buffer)
        found.update(arrival.take(slots, place, checksum(buffer)))
    arrival.finish()
    assert arrival.sent.keys() == found.keys()
    return found


def test_what_fits_a_bucket_is_whole_and_what_does_not_comes_in_rows():
    slots = [[(s.name, s.start, s.stop, s.offset) for s in slots] for slots, _ in sending()]
    assert slots == [
        [("norm", 0, 6, 0)],
        [("embed", 0, 8, 0)],
        [("embed", 8, 10, 0)],
        [("bias", 0, 5, 0)],
        *([("experts", n, n + 1, 0)] for n in range(5)),
        [("wide", 0, 1, 0)],
        [("wide", 1, 2, 0)],
    ]


def test_several_that_fit_share_a_bucket_each_on_its_boundary():
    small = [
        weight("a", torch.zeros(3)),
        weight("b", torch.zeros(2, 4)),
        weight("c", torch.zeros(1)),
    ]
    (first, second) = buckets(small, LIMIT)
    assert [(slot.name, slot.offset) for _, slot in first] == [("a", 0), ("b", 16)]
    assert [(slot.name, slot.offset) for _, slot in second] == [("c", 0)]


def test_slices_become_the_tensor_in_one_piece_of_memory_bit_for_bit():
    found = receive(sending())
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


EMBED, EXPERTS = 1, 4
"""Where the slices of a tensor begin among the buckets."""


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b.pop(EMBED), "row 0 was due, but rows 8 to 10 of embed came"),
        (lambda b: b.pop(EMBED + 1), "row 8 of embed was due, but bias came"),
        (lambda b: b.pop(EXPERTS + 2), "row 2 of experts was due, but rows 3 to 4 of experts came"),
        (lambda b: b.pop(), "the refit ended before row 1 of 2 of wide came"),
        (lambda b: b.insert(EXPERTS, b[EXPERTS]), "row 1 of experts was due, but rows 0 to 1"),
        (
            lambda b: b.insert(EXPERTS + 3, b[EXPERTS + 1]),
            "row 3 of experts was due, but rows 1 to 2",
        ),
        (lambda b: b.insert(EXPERTS, b.pop(EXPERTS + 1)), "row 0 was due, but rows 1 to 2 of exp"),
        (lambda b: b.append(b[0]), "norm came twice"),
        (lambda b: b.extend(b[EMBED : EMBED + 2]), "embed came twice"),
    ],
    ids=[
        "first-missing",
        "last-missing",
        "one-missing",
        "end-missing",
        "first-twice",
        "one-twice",
        "exchanged",
        "tensor-twice",
        "sliced-tensor-twice",
    ],
)
def test_a_slice_that_is_missing_twice_or_out_of_order_is_named(change, message):
    sent = sending()
    change(sent)
    with pytest.raises(RefitError, match=message):
        receive(sent)


def test_a_slice_of_another_shape_is_named():
    sent = sending()
    (slot,), buffer = sent[EMBED + 1]
    sent[EMBED + 1] = [replace(slot, shape=(12, 3))], buffer
    with pytest.raises(RefitError, match="row 8 of embed was due, but rows 8 to 10 of embed came"):
        receive(sent)


def test_changed_bytes_are_named_by_what_they_are_of():
    (slots, buffer), *_ = sending()[EXPERTS:]
    arrival = Arrival(torch.device("cpu"))
    with pytest.raises(RefitError, match="rows 0 to 1 of experts came with a wrong checksum"):
        arrival.take(slots, arrival.buffer(slots, len(buffer)).copy_(buffer + 1), checksum(buffer))


def test_tensors_of_any_size_and_place_are_summed():
    whole = torch.arange(9, dtype=torch.bfloat16)
    for start, stop in ((0, 9), (1, 4), (3, 8)):
        part = whole[start:stop]
        assert Sent.of(part) == Sent.of(part.clone())
        assert Sent.of(part) != Sent.of(part + 1)


KEPT = {"norm": torch.arange(8.0), "head": torch.ones(3, 2, dtype=torch.bfloat16)}


def sent(**tensors: torch.Tensor) -> dict[str, Sent]:
    return {name: Sent.of(tensor) for name, tensor in tensors.items()}


def test_tensors_that_the_engine_keeps_are_compared_under_its_names():
    found = sent(outer_norm=KEPT["norm"].clone(), outer_head=KEPT["head"].clone())
    assert check_kept(found, KEPT, lambda name: name.removeprefix("outer_")) == 2


@pytest.mark.parametrize(
    "wrong",
    [KEPT["norm"].flip(0), KEPT["norm"] + torch.eye(8)[7] * 1e-6, -KEPT["norm"]],
    ids=["permuted", "one bit", "sign"],
)
def test_a_tensor_that_the_engine_holds_otherwise_is_named(wrong):
    with pytest.raises(RefitError, match="norm: the engine holds another tensor"):
        check_kept(sent(norm=wrong, head=KEPT["head"]), KEPT, lambda name: name)


def test_what_the_engine_packs_or_fuses_is_left_to_the_probe_but_not_everything():
    other_shape = torch.zeros(4, 2)
    compared = check_kept(
        sent(norm=KEPT["norm"], q_proj=other_shape, head=other_shape), KEPT, lambda name: name
    )
    assert compared == 1
    with pytest.raises(RefitError, match="none of the 1 tensors"):
        check_kept(sent(q_proj=other_shape), KEPT, lambda name: None)
