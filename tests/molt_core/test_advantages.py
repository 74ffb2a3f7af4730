"""Advantage estimators against numbers worked by hand, and the symmetries that they must have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_core.algo.advantages import (
    RolloutTokens,
    advantages,
    discounted_returns,
    grpo,
    register_advantage,
    reinforce_pp,
    rollout_tokens,
)
from molt_core.algo.aggregation import weighted_rollouts
from molt_core.algo.config import AlgorithmConfig, KLConfig
from molt_core.types import Batch, Group, Rollout
from tests.molt_core.make import group, trajectory

CONFIG = AlgorithmConfig()
KL_REWARD = KLConfig(coef=0.1, place="reward", estimator="k1")


def tokens(rewards, groups, lengths, behaviour=None, reference=None) -> RolloutTokens:
    count = sum(lengths)
    return RolloutTokens(
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(groups),
        rollout=torch.repeat_interleave(torch.tensor(lengths)),
        behaviour_logprobs=torch.zeros(count) if behaviour is None else torch.tensor(behaviour),
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    # Group 0: 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, /3 -> std 2.160247. Group 1: 0, 4: mean 2, std sqrt(8).
    out = grpo(tokens([1, 2, 3, 6, 0, 4], [0, 0, 0, 0, 1, 1], [1, 2, 1, 1, 1, 1]), CONFIG)
    expected = [-0.9258201, -0.4629100, -0.4629100, 0.0, 1.3887301, -0.7071068, 0.7071068]
    assert out.tolist() == pytest.approx(expected, abs=1e-6)
    assert out.dtype == torch.float32


def test_grpo_of_a_single_sample_is_zero():
    assert grpo(tokens([7.0, 1.0, 3.0], [0, 1, 1], [2, 1, 1]), CONFIG)[:2].tolist() == [0.0, 0.0]


@given(reward=st.floats(-1e9, 1e9), size=st.integers(2, 9))
def test_grpo_of_equal_rewards_is_zero_exactly(reward, size):
    assert not grpo(tokens([reward] * size, [0] * size, [1] * size), CONFIG).any()


group_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@st.composite
def batches(draw):
    """Uneven groups with rollouts of uneven length, one of which may be empty."""
    groups = [g for g, size in enumerate(draw(group_sizes)) for _ in range(size)]
    lengths = draw(st.lists(st.integers(0, 4), min_size=len(groups), max_size=len(groups)))
    lengths[0] = max(1, lengths[0])
    rewards = draw(st.lists(st.integers(-3, 3), min_size=len(groups), max_size=len(groups)))
    return [float(r) for r in rewards], groups, lengths


@given(batch=batches(), seed=st.integers(0, 99))
@pytest.mark.parametrize("estimator", [grpo, reinforce_pp])
def test_order_of_rollouts_and_groups_does_not_matter(estimator, batch, seed):
    rewards, groups, lengths = batch
    order = np.random.default_rng(seed).permutation(len(rewards))
    relabel = np.random.default_rng(seed + 1).permutation(max(groups) + 1)
    straight = estimator(tokens(rewards, groups, lengths), CONFIG).split(lengths)
    shuffled_lengths = [lengths[i] for i in order]
    shuffled = estimator(
        tokens(
            [rewards[i] for i in order], [int(relabel[groups[i]]) for i in order], shuffled_lengths
        ),
        CONFIG,
    ).split(shuffled_lengths)
    for place, i in enumerate(order):
        torch.testing.assert_close(shuffled[place], straight[i], rtol=0, atol=1e-6)


@given(batch=batches(), scale=st.floats(0.5, 1e3), shift=st.floats(-100, 100))
def test_grpo_ignores_the_scale_and_the_offset_of_rewards(batch, scale, shift):
    rewards, groups, lengths = batch
    moved = [scale * r + shift for r in rewards]
    torch.testing.assert_close(
        grpo(tokens(moved, groups, lengths), CONFIG),
        grpo(tokens(rewards, groups, lengths), CONFIG),
        rtol=0,
        atol=1e-5,
    )


@given(batch=batches())
def test_grpo_sums_to_zero_over_the_rollouts_of_a_group(batch):
    rewards, groups, _ = batch
    out = grpo(tokens(rewards, groups, [1] * len(groups)), CONFIG)
    assert torch.bincount(torch.tensor(groups), out).abs().max() < 1e-5


def test_reinforce_pp_discounts_the_last_token_s_reward_and_whitens_over_the_batch():
    # gamma 0.5. Rollout 0 (reward 8, three tokens): returns 2, 4, 8. Rollout 1 (reward -2, two tokens): -1, -2.
    # Mean 2.2; squared deviations 0.04 + 3.24 + 33.64 + 10.24 + 17.64 = 64.8; biased std sqrt(12.96) = 3.6.
    config = AlgorithmConfig(advantage="reinforce_pp", gamma=0.5)
    out = reinforce_pp(tokens([8, -2], [0, 1], [3, 2]), config)
    expected = [-0.2 / 3.6, 1.8 / 3.6, 5.8 / 3.6, -3.2 / 3.6, -4.2 / 3.6]
    assert out.tolist() == pytest.approx(expected, abs=1e-6)


def test_reinforce_pp_pays_the_kl_to_the_reference_token_by_token():
    # kl.coef 0.1, gamma 1. log pi - log ref: 1, -2 | 0. Token rewards -0.1, 0.2 + 1 | 0: returns 1.1, 1.2 | 0.
    # Mean 2.3 / 3, biased variance (1.21 + 1.44) / 3 - (2.3 / 3)^2 = 0.2955556.
    config = AlgorithmConfig(advantage="reinforce_pp", kl=KL_REWARD)
    given_tokens = tokens([1, 0], [0, 1], [2, 1], [-1.0, -3.0, -0.5], [-2.0, -1.0, -0.5])
    expected = [(g - 2.3 / 3) / 0.2955556**0.5 for g in (1.1, 1.2, 0.0)]
    assert reinforce_pp(given_tokens, config).tolist() == pytest.approx(expected, abs=1e-5)


def test_reinforce_pp_refuses_a_kl_without_a_reference():
    config = AlgorithmConfig(advantage="reinforce_pp", kl=KL_REWARD)
    with pytest.raises(ValueError, match="algorithm.kl needs a reference policy"):
        reinforce_pp(tokens([1], [0], [1]), config)


def test_reinforce_pp_of_equal_rewards_is_zero():
    assert not reinforce_pp(tokens([3, 3], [0, 1], [2, 4]), CONFIG).any()


@settings(max_examples=50)
@given(batch=batches(), gamma=st.floats(0.1, 1.0))
def test_returns_follow_the_recursion_inside_each_rollout(batch, gamma):
    _, _, lengths = batch
    rewards = torch.randn(
        sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected = []
    for part in rewards.split(lengths):
        total, out = 0.0, []
        for reward in reversed(part.tolist()):
            total = reward + gamma * total
            out.append(total)
        expected += out[::-1]
    rollout = torch.repeat_interleave(torch.tensor(lengths))
    assert discounted_returns(rewards, rollout, gamma).tolist() == pytest.approx(expected)


def two_segment_batch() -> Batch:
    """Group 0: one rollout of two segments (2 and 1 tokens) and one of one segment (3). Group 1: one rollout, 1 token."""
    first = Rollout(
        "a", (trajectory(actions=2, logprob=-1), trajectory(actions=1, logprob=-2)), 1.0
    )
    second = Rollout("b", (trajectory(actions=3, logprob=-3),), 0.0)
    third = Rollout("c", (trajectory(actions=1, logprob=-4),), 5.0)
    return Batch((Group("p", 0, (first, second), 6, 0), Group("q", 1, (third,), 1, 0)), version=0)


def test_a_batch_flattens_in_the_order_of_groups_rollouts_and_segments():
    flat = rollout_tokens(two_segment_batch())
    assert flat.reward.tolist() == [1, 0, 5]
    assert flat.group.tolist() == [0, 0, 1]
    assert flat.rollout.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert flat.behaviour_logprobs.tolist() == [-1, -1, -2, -3, -3, -3, -4]


def test_segments_of_a_rollout_share_its_one_reward_and_one_weight():
    # Counted by segments, group 0 would hold rewards 1, 1, 0. By rollouts: 1, 0: mean 1/2, sample std sqrt(1/2).
    out = weighted_rollouts(two_segment_batch(), CONFIG)
    expected = [[0.7071068] * 3, [-0.7071068] * 3, [0.0]]
    assert [r.advantages.tolist() for r in out] == [pytest.approx(a, abs=1e-6) for a in expected]


def test_a_group_with_a_lost_member_is_compared_with_those_left():
    whole = group(0, rewards=(0.0, 1.0, 2.0))
    left = replace(whole, rollouts=whole.rollouts[:2])
    out = weighted_rollouts(Batch((left,), 0), CONFIG)
    assert [r.advantages[0] for r in out] == pytest.approx([-0.7071068, 0.7071068], abs=1e-6)


@pytest.mark.parametrize(
    "wrong", [lambda n: torch.zeros(n + 1), lambda n: torch.full((n,), torch.nan)]
)
def test_a_wrong_result_of_an_estimator_is_refused_by_name(wrong):
    name = f"wrong_{id(wrong)}"
    register_advantage(name)(lambda tokens, config: wrong(len(tokens.rollout)))
    with pytest.raises(ValueError, match=f"{name} returned .* 7 sampled tokens"):
        advantages(rollout_tokens(two_segment_batch()), AlgorithmConfig(advantage=name))
