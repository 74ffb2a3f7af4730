"""The cut of a batch: no row lost or repeated, bounds kept, ranks alike in micro-batches and near in tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_core.config import TrainerConfig
from molt_core.train.split import shares, split_units
from tests.molt_core.make import weighted

units = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 4)), min_size=1, max_size=40)


@given(units, st.integers(1, 5), st.integers(1, 9), st.none() | st.integers(1, 120))
def test_every_unit_goes_to_one_micro_batch_within_the_bounds(units, data_size, max_rows, tokens):
    lengths, rows = zip(*units)
    split = split_units(lengths, data_size, max_rows=max_rows, max_tokens=tokens, rows=rows)
    assert len(split) == data_size
    assert len({len(share) for share in split}) == 1
    assert sorted(i for share in split for m in share for i in m) == list(range(len(units)))
    for part in (m for share in split for m in share if len(m) > 1):
        assert sum(rows[i] for i in part) <= max_rows
        assert tokens is None or sum(lengths[i] for i in part) <= tokens


@given(units, st.integers(1, 5))
def test_no_rank_has_more_tokens_than_another_by_more_than_the_longest_unit(units, data_size):
    lengths = [length for length, _ in units]
    split = split_units(lengths, data_size, max_rows=4)
    tokens = [sum(lengths[i] for m in share for i in m) for share in split]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_a_token_bound_fills_micro_batches_by_first_fit():
    # Longest first: 9 | 6 | 4 beside 6 | 3 alone, then 1 beside 9.
    split = split_units([3, 9, 1, 6, 4], 1, max_rows=8, max_tokens=10)
    assert split == [[[1, 2], [3, 4], [0]]]


def test_a_rank_without_rows_gets_one_token_that_nobody_sampled():
    rollouts = [weighted(actions=3)]
    first, second = shares(rollouts, 2, TrainerConfig())
    assert first == [rollouts]
    [[filler]] = second
    assert filler.segments[0].action_tokens == 0 and len(filler.weights) == 0
    assert filler.segments[0].token_ids.tolist() == [0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 9))
def test_every_rollout_goes_whole_to_one_micro_batch(segments, data_size, max_rows):
    rollouts = [weighted(actions=2, segments=count) for count in segments]
    split = shares(rollouts, data_size, TrainerConfig(micro_batch_rows=max_rows))
    parts = [part for share in split for part in share]
    for part in parts:
        assert sum(len(one.segments) for one in part) <= max_rows or len(part) == 1
    trained = [one for part in parts for one in part if len(one.weights)]
    assert sorted(map(id, trained)) == sorted(map(id, rollouts))


def test_arrays_of_another_length_are_refused():
    wrong = weighted(actions=3)._replace(advantages=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="rollout 1: 2 advantages and 3 weights for 3 sampled tok"):
        shares([weighted(), wrong], 1, TrainerConfig())
