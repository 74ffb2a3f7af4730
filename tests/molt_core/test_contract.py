"""The data contract refuses what would train a wrong token, and counts what the books rely on."""

from dataclasses import replace

import numpy as np
import pytest

from molt_core.types import NOT_SAMPLED, Batch, ContractError, Rollout, Trajectory, Turn
from tests.molt_core.make import group, trajectory

VALID = trajectory(prompt=2, actions=3)
"""Positions 0 and 1 are prompt, 2 to 4 are sampled."""


def changed(name: str, position: int, value) -> dict:
    array = getattr(VALID, name).copy()
    array[position] = value
    return {name: array}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed("action_mask", 1, True), "inside the prompt"),
        (changed("action_mask", 3, False), "disagree about which tokens were sampled"),
        ({"turns": (Turn(2, 4, {}, 0, "stop"),)}, "disagree about which tokens were sampled"),
        (changed("logprobs", 2, np.nan), "not finite"),
        (changed("logprobs", 4, -np.inf), "not finite"),
        (changed("logprobs", 3, 0.1), "positive"),
        (changed("logprobs", 0, -0.5), "not sampled"),
        (changed("versions", 1, 0), "not sampled"),
        (changed("versions", 4, NOT_SAMPLED), "policy version is unknown"),
        ({"mixed": np.zeros(4, bool)}, "mixed has 4 entries for 5 tokens"),
        ({"versions": np.zeros(6, np.int32)}, "versions has 6 entries for 5 tokens"),
        ({"prompt_length": 0}, "outside 1..5"),
        ({"prompt_length": 6}, "outside 1..5"),
    ],
)
def test_a_broken_trajectory_is_refused(fields, message):
    with pytest.raises(ContractError, match=message):
        replace(VALID, **fields)


def test_a_log_probability_of_zero_may_exceed_it_by_rounding():
    replace(VALID, **changed("logprobs", 2, 5e-6))


def test_an_observation_between_turns_is_not_an_action():
    sampled = np.array([False, True, True, False, True])
    row = Trajectory(
        token_ids=np.arange(5, dtype=np.int32),
        prompt_length=1,
        action_mask=sampled,
        logprobs=np.where(sampled, np.float32(-1), np.float32(0)),
        versions=np.where(sampled, [0, 4, 4, 0, 5], NOT_SAMPLED).astype(np.int32),
        mixed=np.zeros(5, bool),
        turns=(Turn(1, 3, {}, 0, "stop"), Turn(4, 5, {}, 1, "length")),
    )
    assert row.action_tokens == 3
    assert row.tokens_across_refit == 1


def test_a_trajectory_of_prompt_only_has_no_action():
    row = trajectory(actions=0)
    assert (row.action_tokens, row.tokens_across_refit) == (0, 0)


def test_the_global_denominator_counts_sampled_tokens_of_all_segments():
    two_segments = Rollout("r", (trajectory(actions=2), trajectory(actions=5)), 1.0)
    first = replace(group(0), rollouts=(two_segments,))
    assert Batch((first, group(1)), version=0).action_tokens == 7 + 2 * 4
