"""Collation: which token a log-probability belongs to, padding that changes nothing, images in row order."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from molt_core.train.collate import collate
from molt_core.types import NOT_SAMPLED, ImageInput, Trajectory, Turn
from tests.molt_core.make import trajectory


def two_turns() -> Trajectory:
    """Ids 10..16: prompt 10 11, sampled 12 13, an observation 14, sampled 15 16; log-prob of id i is -i."""
    ids = np.arange(10, 17, dtype=np.int32)
    sampled = np.isin(ids, (12, 13, 15, 16))
    return Trajectory(
        token_ids=ids,
        prompt_length=2,
        action_mask=sampled,
        logprobs=np.where(sampled, -ids, 0).astype(np.float32),
        versions=np.where(sampled, 0, NOT_SAMPLED).astype(np.int32),
        mixed=np.zeros(7, bool),
        turns=(Turn(2, 4, {}, 0, "stop"), Turn(5, 7, {}, 1, "stop")),
    )


def test_every_sampled_token_stands_beside_its_own_log_probability():
    batch = collate([trajectory(prompt=4, actions=2, logprob=-0.5), two_turns()])
    assert batch.action_ids.tolist() == [4, 5, 12, 13, 15, 16]
    assert batch.behaviour_logprobs.tolist() == [-0.5, -0.5, -12, -13, -15, -16]
    assert batch.action_rows.tolist() == [0, 0, 1, 1, 1, 1]
    # The first row lies at 0..5, the second, which is longer, at 6..12.
    assert batch.action_positions.tolist() == [4, 5, 8, 9, 11, 12]


def test_advantages_follow_the_rows():
    rows = [trajectory(actions=2), trajectory(actions=1)]
    batch = collate(rows, [np.array([1, 2], np.float32), np.array([3], np.float32)])
    assert batch.advantages.tolist() == [1, 2, 3]


def test_rows_lie_end_to_end_with_equally_long_ones_side_by_side():
    rows = [trajectory(prompt=p, actions=a) for p, a in ((4, 3), (2, 1), (5, 2), (1, 1))]
    batch = collate(rows, [np.full(row.action_tokens, n) for n, row in enumerate(rows)])
    assert batch.blocks == ((1, 2), (1, 3), (2, 7))
    assert batch.row_starts.tolist() == [5, 2, 12, 0]
    assert batch.token_ids.tolist() == [0, 1, 0, 1, 2, *range(7), *range(7)]
    assert batch.position_ids[0].tolist() == batch.token_ids.tolist()
    assert batch.tokens_forward == 19
    # Whatever the order in which they lie, actions keep the order of the rows.
    assert batch.advantages.tolist() == [0, 0, 0, 1, 2, 2, 3]
    assert batch.action_positions.tolist() == [9, 10, 11, 4, 17, 18, 1]


def test_a_record_of_routing_lies_beside_its_token_and_its_absence_is_minus_one():
    routed = np.arange(4 * 2 * 3, dtype=np.int16).reshape(4, 2, 3)
    recorded = replace(trajectory(prompt=3, actions=1), routed_experts=routed)
    assert collate([trajectory()]).routed_experts is None
    batch = collate([recorded, trajectory(prompt=1, actions=2)])
    assert batch.routed_experts[3:].tolist() == routed.tolist()
    assert (batch.routed_experts[:3] == -1).all()


def image(start: int, value: float) -> ImageInput:
    """A 32 x 64 image of 8-pixel patches: grid 4 x 8, two by two merged: 8 placeholder tokens."""
    patches = np.full((32, 3), value, np.float32)
    return ImageInput(np.zeros((32, 64, 3), np.uint8), patches, (1, 4, 8), start, 8)


def test_patches_placeholders_and_features_go_in_the_order_in_which_rows_lie():
    longer = trajectory(prompt=20, actions=1, images=(image(1, 1.0), image(10, 2.0)))
    shorter = trajectory(prompt=12, actions=1, images=(image(3, 3.0),))
    again = trajectory(prompt=13, actions=1, images=shorter.images)
    batch = collate([longer, shorter, again])
    assert batch.row_starts.tolist() == [27, 0, 13]
    assert batch.patches[:, 0].tolist() == [3.0] * 32 + [1.0] * 32 + [2.0] * 32
    assert batch.grid_thw.tolist() == [[1, 4, 8]] * 3
    spans = [*range(3, 11), *range(16, 24), *range(28, 36), *range(37, 45)]
    assert batch.image_positions.tolist() == spans
    assert batch.feature_index.tolist() == [*range(8), *range(8), *range(8, 16), *range(16, 24)]


def test_text_goes_on_one_past_the_largest_position_of_an_image():
    # Two text tokens at 0, 1; a merged grid of 2 rows and 4 columns from 2 on; text again from 2 + max(2, 4) = 6.
    batch = collate([trajectory(prompt=11, actions=1, images=(image(2, 0.0),))])
    time, height, width = batch.position_ids.tolist()
    assert time == [0, 1] + [2] * 8 + [6, 7]
    assert height == [0, 1] + [2] * 4 + [3] * 4 + [6, 7]
    assert width == [0, 1] + [2, 3, 4, 5] * 2 + [6, 7]


@pytest.mark.parametrize("rows", [[two_turns()], [trajectory(), two_turns()]])
def test_text_rows_have_no_patches(rows):
    batch = collate(rows)
    assert batch.patches is None and batch.grid_thw is None and batch.image_positions is None


def test_a_picture_that_samples_of_a_prompt_share_is_read_once_also_after_a_journey():
    """What holds it is another object in every sample; the patches are one, and stay one where they are pickled together."""
    patches = np.zeros((16, 4), np.float32)
    picture = ImageInput(None, patches, (1, 4, 4), start=1, length=4)
    rows = [replace(trajectory(prompt=6, actions=2), images=(replace(picture),)) for _ in range(3)]
    for given in (rows, pickle.loads(pickle.dumps(rows))):
        batch = collate(given)
        assert batch.grid_thw.tolist() == [[1, 4, 4]] and batch.patches.shape == (16, 4)
        assert batch.feature_index.tolist() == [0, 1, 2, 3] * 3
