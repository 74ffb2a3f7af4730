"""Collation: which token a log-probability belongs to, padding that changes nothing, images in row order."""

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
    assert batch.action_columns.tolist() == [4, 5, 2, 3, 5, 6]


def test_advantages_follow_the_rows():
    rows = [trajectory(actions=2), trajectory(actions=1)]
    batch = collate(rows, [np.array([1, 2], np.float32), np.array([3], np.float32)])
    assert batch.advantages.tolist() == [1, 2, 3]


def test_padding_is_on_the_right_to_a_multiple_and_counts_as_no_token():
    batch = collate([trajectory(prompt=4, actions=3), trajectory(prompt=2, actions=1)], pad_to=8)
    assert batch.token_ids.shape == (2, 8)
    assert batch.attention_mask.tolist() == [[True] * 7 + [False], [True] * 3 + [False] * 5]
    assert batch.tokens_forward == 10


def image(start: int, value: float) -> ImageInput:
    """A 32 x 64 image of 8-pixel patches: grid 4 x 8, two by two merged: 8 placeholder tokens."""
    patches = np.full((32, 3), value, np.float32)
    return ImageInput(np.zeros((32, 64, 3), np.uint8), patches, (1, 4, 8), start, 8)


def test_patches_go_in_row_order_and_placeholders_are_masked():
    first = trajectory(prompt=20, actions=1, images=(image(1, 1.0), image(10, 2.0)))
    second = trajectory(prompt=12, actions=1, images=(image(3, 3.0),))
    batch = collate([first, second])
    assert batch.patches[:, 0].tolist() == [1.0] * 32 + [2.0] * 32 + [3.0] * 32
    assert batch.grid_thw.tolist() == [[1, 4, 8]] * 3
    assert np.flatnonzero(batch.image_mask[0]).tolist() == [*range(1, 9), *range(10, 18)]
    assert np.flatnonzero(batch.image_mask[1]).tolist() == [*range(3, 11)]


def test_text_goes_on_one_past_the_largest_position_of_an_image():
    # Two text tokens at 0, 1; a merged grid of 2 rows and 4 columns from 2 on; text again from 2 + max(2, 4) = 6.
    batch = collate([trajectory(prompt=11, actions=1, images=(image(2, 0.0),))])
    time, height, width = batch.position_ids[:, 0].tolist()
    assert time == [0, 1] + [2] * 8 + [6, 7]
    assert height == [0, 1] + [2] * 4 + [3] * 4 + [6, 7]
    assert width == [0, 1] + [2, 3, 4, 5] * 2 + [6, 7]


@pytest.mark.parametrize("rows", [[two_turns()], [trajectory(), two_turns()]])
def test_text_rows_have_no_patches(rows):
    batch = collate(rows)
    assert batch.patches is None and batch.grid_thw is None and not batch.image_mask.any()
