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
    dr_grpo,
    flash_reinforce,
    gae,
    grpo,
    lambda_returns,
    on_policy_distillation,
    register_advantage,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    rollout_tokens,
)
from molt_core.algo.aggregation import weighted_rollouts
from molt_core.algo.config import AlgorithmConfig, KLConfig
from molt_core.types import Batch, Group, Rollout
from tests.molt_core.make import group, trajectory

CONFIG = AlgorithmConfig()
KL_REWARD = KLConfig(coef=0.1, place="reward", estimator="k1")
GROUP_ESTIMATORS = [grpo, dr_grpo, rloo, reinforce_pp_baseline]


def tokens(
    rewards, groups, lengths, behaviour=None, reference=None, teacher=None, values=None, policy=None
) -> RolloutTokens:
    """On policy, unless ``policy`` is given."""
    count = sum(lengths)
    policy = behaviour if policy is None else policy
    return RolloutTokens(
        reward=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(groups),
        rollout=torch.repeat_interleave(torch.tensor(lengths)),
        behaviour_logprobs=torch.zeros(count) if behaviour is None else torch.as_tensor(behaviour),
        reference_logprobs=None if reference is None else torch.as_tensor(reference),
        teacher_logprobs=None if teacher is None else torch.as_tensor(teacher),
        policy_logprobs=torch.zeros(count) if policy is None else torch.as_tensor(policy),
        values=None if values is None else torch.tensor(values),
    )


group_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@st.composite
def batches(draw):
    """Uneven groups with rollouts of uneven length, one of which may be empty."""
    groups = [g for g, size in enumerate(draw(group_sizes)) for _ in range(size)]
    lengths = draw(st.lists(st.integers(0, 4), min_size=len(groups), max_size=len(groups)))
    lengths[0] = max(1, lengths[0])
    rewards = draw(st.lists(st.integers(-3, 3), min_size=len(groups), max_size=len(groups)))
    return [float(r) for r in rewards], groups, lengths


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    # Group 0: 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, /3 -> std 2.160247. Group 1: 0, 4: mean 2, std sqrt(8).
    out = grpo(tokens([1, 2, 3, 6, 0, 4], [0, 0, 0, 0, 1, 1], [1, 2, 1, 1, 1, 1]), CONFIG)
    expected = [-0.9258201, -0.4629100, -0.4629100, 0.0, 1.3887301, -0.7071068, 0.7071068]
    assert out.tolist() == pytest.approx(expected, abs=1e-6)
    assert out.dtype == torch.float32


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_a_sample_alone_in_its_group_has_nothing_to_be_compared_with(estimator):
    found = estimator(tokens([7.0, 1.0, 3.0], [0, 1, 1], [2, 1, 1]), CONFIG)
    assert found[:2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, flash_reinforce])
@given(reward=st.floats(-1e9, 1e9), size=st.integers(2, 9))
def test_equal_rewards_have_advantage_zero_exactly(estimator, reward, size):
    assert not estimator(tokens([reward] * size, [0] * size, [1] * size), CONFIG).any()


def test_dr_grpo_subtracts_the_group_s_mean_and_divides_by_nothing():
    # Group 0: 1, 2, 3, 6 around 3. Group 1, uneven: 0, 4 around 2.
    out = dr_grpo(tokens([1, 2, 3, 6, 0, 4], [0, 0, 0, 0, 1, 1], [1, 2, 1, 1, 1, 1]), CONFIG)
    assert out.tolist() == [-2.0, -1.0, -1.0, 0.0, 3.0, -2.0, 2.0]


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 - (2 + 6)/2 = -3, 2 - (1 + 6)/2 = -1.5, 6 - (1 + 2)/2 = 4.5; in a pair 0 - 4 and 4 - 0.
    out = rloo(tokens([1, 2, 6, 0, 4], [0, 0, 0, 1, 1], [1, 1, 2, 1, 1]), CONFIG)
    assert out.tolist() == pytest.approx([-3.0, -1.5, 4.5, 4.5, -4.0, 4.0])


def test_reinforce_pp_baseline_whitens_the_centred_rewards_over_tokens():
    # Group 0: 0, 4 around 2, one and three tokens: -2, 2, 2, 2. Group 1, alone: 0, 0. Mean 4/6 = 2/3;
    # squares 64/9 + 3 * 16/9 + 2 * 4/9 = 120/9, over 6: variance 20/9.
    out = reinforce_pp_baseline(tokens([0, 4, 9], [0, 0, 1], [1, 3, 2]), CONFIG)
    std = (20 / 9) ** 0.5
    assert out.tolist() == pytest.approx([-8 / 3 / std] + [4 / 3 / std] * 3 + [-2 / 3 / std] * 2)


def test_flash_reinforce_compares_with_the_batch_one_weight_a_rollout():
    # Rewards 0, 1, 5 of rollouts of 1, 4 and 1 tokens: mean 2, whatever the lengths; single samples are fine.
    out = flash_reinforce(tokens([0, 1, 5], [0, 1, 2], [1, 4, 1]), CONFIG)
    assert out.tolist() == [-2.0, -1.0, -1.0, -1.0, -1.0, 3.0]


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5, reward 8 at the end. V 1, 2, 4. Deltas 0 + 1 - 1 = 0, 0 + 2 - 2 = 0, 8 - 4 = 4.
    # A_3 = 4, A_2 = 0 + 0.25 * 4 = 1, A_1 = 0.25. The second rollout knows nothing of the first: 3 - 1 = 2.
    config = AlgorithmConfig(advantage="gae", gamma=0.5, gae_lambda=0.5)
    out = gae(tokens([8, 3], [0, 1], [3, 1], values=[1.0, 2.0, 4.0, 1.0]), config)
    assert out.tolist() == pytest.approx([0.25, 1.0, 4.0, 2.0])


def test_a_critic_is_trained_towards_its_value_plus_the_advantage_of_gae():
    # The numbers above: 1 + 0.25, 2 + 1, 4 + 4, 1 + 2, whatever the estimator makes of them.
    config = AlgorithmConfig(advantage="my_own", plugins=("my.py",), gamma=0.5, gae_lambda=0.5)
    out = lambda_returns(tokens([8, 3], [0, 1], [3, 1], values=[1.0, 2.0, 4.0, 1.0]), config)
    assert out.tolist() == pytest.approx([1.25, 3.0, 8.0, 3.0])


def test_gae_goes_through_segments_as_if_nothing_stood_between_them():
    # One rollout of 2 and 1 sampled tokens, reward 1; gamma 1, lambda 0: delta_t = r_t + V_{t+1} - V_t.
    config = AlgorithmConfig(advantage="gae", gae_lambda=0.0)
    values = np.array([0.5, 0.25, 0.75, 0, 0, 0, 4], np.float32)
    first, second, third = weighted_rollouts(two_segment_batch(), config, values=values)
    assert first.advantages.tolist() == [-0.25, 0.5, 0.25]
    assert first.values.tolist() == [0.5, 0.25, 0.75]
    assert first.returns.tolist() == [0.25, 0.75, 1.0]
    assert (second.advantages.tolist(), third.advantages.tolist()) == ([0.0, 0.0, 0.0], [1.0])


def test_without_a_critic_a_rollout_has_neither_values_nor_returns():
    assert {(r.values, r.returns) for r in weighted_rollouts(two_segment_batch(), CONFIG)} == {
        (None, None)
    }


@settings(max_examples=50)
@given(batch=batches(), gamma=st.floats(0.1, 1.0))
def test_gae_of_lambda_one_is_the_return_minus_the_value(batch, gamma):
    rewards, groups, lengths = batch
    values = torch.linspace(-1, 1, sum(lengths)).tolist()
    config = AlgorithmConfig(advantage="gae", gamma=gamma, gae_lambda=1.0)
    rollout = torch.repeat_interleave(torch.tensor(lengths))
    paid, last = torch.zeros(sum(lengths), dtype=torch.float64), np.cumsum(lengths) - 1
    for reward, length, place in zip(rewards, lengths, last):
        if length:
            paid[place] = reward
    expected = discounted_returns(paid, rollout, gamma) - torch.tensor(values)
    found = gae(tokens(rewards, groups, lengths, values=values), config)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_gae_refuses_to_go_without_a_critic():
    with pytest.raises(ValueError, match="gae needs a critic"):
        gae(tokens([1], [0], [1]), CONFIG)


def test_distillation_pays_each_token_its_log_ratio_to_the_teacher_and_no_reward():
    # log teacher - log student: -1 + 2 = 1, -3 + 1 = -2.
    given_tokens = tokens([9.0], [0], [2], behaviour=[-2.0, -1.0], teacher=[-1.0, -3.0])
    assert on_policy_distillation(given_tokens, CONFIG).tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    "config",
    [
        AlgorithmConfig(advantage="on_policy_distillation", teacher="folder"),
        AlgorithmConfig(advantage="gae", kl=KLConfig(coef=1.0, place="reward", estimator="k1")),
    ],
    ids=["distillation", "KL in the reward"],
)
def test_under_lag_a_divergence_as_a_reward_has_the_gradient_of_the_stepped_policy(config):
    # Three ids, sampled from another policy: the sum over them is the exact expectation, every weight is pi / mu.
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    sampler = torch.tensor([-0.5, 0.8, 0.1]).log_softmax(0)
    target = torch.tensor([0.3, 0.3, 0.4]).log()
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - target)).sum(), logits)
    sampled = {"behaviour": sampler, "reference": target, "teacher": target, "values": [0.0] * 3}
    given_tokens = tokens([0.0] * 3, [0, 1, 2], [1] * 3, **sampled, policy=policy.detach())
    advantage = advantages(given_tokens, config)
    weight = (policy.detach() - sampler).exp()
    logprobs = logits.log_softmax(0)
    loss = (sampler.exp() * weight * -advantage * logprobs).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], exact)


def test_a_divergence_as_a_reward_refuses_to_go_without_the_policy():
    config = AlgorithmConfig(advantage="on_policy_distillation", teacher="folder")
    sampled_alone = replace(tokens([0], [0], [1], [-1.0], teacher=[-2.0]), policy_logprobs=None)
    with pytest.raises(ValueError, match="needs the stepped policy's log-probabilities"):
        advantages(sampled_alone, config)


def test_distillation_refuses_to_go_without_a_teacher():
    with pytest.raises(ValueError, match="needs a teacher"):
        on_policy_distillation(tokens([1], [0], [1]), CONFIG)


@given(batch=batches(), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    "estimator", [*GROUP_ESTIMATORS, reinforce_pp, flash_reinforce, gae, on_policy_distillation]
)
def test_order_of_rollouts_and_groups_does_not_matter(estimator, batch, seed):
    rewards, groups, lengths = batch
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(rewards))
    relabel = generator.permutation(max(groups) + 1)
    of_tokens = {name: generator.normal(size=sum(lengths)) for name in ("teacher", "values")}
    config = CONFIG.model_copy(update={"gamma": 0.9, "gae_lambda": 0.8})
    straight = estimator(tokens(rewards, groups, lengths, **of_tokens), config).split(lengths)
    starts, shuffled_lengths = np.cumsum([0, *lengths]), [lengths[i] for i in order]
    along = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    shuffled = estimator(
        tokens(
            [rewards[i] for i in order],
            [int(relabel[groups[i]]) for i in order],
            shuffled_lengths,
            **{name: column[along] for name, column in of_tokens.items()},
        ),
        config,
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
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6), gamma=st.floats(0.1, 1.0))
def test_returns_follow_the_recursion_inside_each_rollout(lengths, gamma):
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


@pytest.mark.parametrize(
    "estimator",
    [*GROUP_ESTIMATORS, flash_reinforce, reinforce_pp, gae, on_policy_distillation],
)
def test_a_batch_without_a_sampled_token_has_no_advantage_and_is_no_error(estimator):
    nothing = tokens([1.0, 0.0], [0, 0], [0, 0], [], [], [], [])
    assert estimator(nothing, CONFIG).shape == (0,)


@pytest.mark.parametrize("reward", [1e300, -1e31, float("inf"), float("nan")])
def test_a_reward_that_no_estimator_could_tell_from_nothing_is_refused(reward):
    with pytest.raises(ValueError, match="a reward of the batch is"):
        advantages(tokens([reward, 0.0], [0, 0], [1, 1]), CONFIG)


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
        config = AlgorithmConfig(advantage=name, plugins=("my.py",))
        advantages(rollout_tokens(two_segment_batch()), config)
