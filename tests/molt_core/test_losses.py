"""Every loss against numbers worked by hand, its gradient against finite differences in float64, and what it must survive."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.config import AlgorithmConfig
from molt_core.algo.losses import (
    LossTokens,
    cispo,
    clipped,
    explained_variance,
    gspo,
    policy_gradient,
    value_loss,
)

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.5)
DUAL = AlgorithmConfig(clip_low=0.2, clip_high=0.5, dual_clip=3.0)
LOSSES = {
    "clipped": (clipped, CONFIG),
    "dual": (clipped, DUAL),
    "gspo": (gspo, CONFIG),
    "cispo": (cispo, CONFIG),
    "policy_gradient": (policy_gradient, CONFIG),
}
every_loss = pytest.mark.parametrize(("loss", "config"), LOSSES.values(), ids=LOSSES)


def loss_tokens(ratios, advantages, sequence=None, requires_grad=False) -> LossTokens:
    """Tokens whose policy is ``ratios`` times a proximal policy of log-probability -1."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log() - 1
    base = torch.full_like(logprobs, -1)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    sequence = torch.arange(len(ratios)) if sequence is None else torch.tensor(sequence)
    return LossTokens(logprobs.requires_grad_(requires_grad), base, base, advantages, sequence)


def gradient(loss, tokens: LossTokens, config) -> list[float]:
    loss(tokens, config)[0].sum().backward()
    return tokens.logprobs.grad.tolist()


def test_clip_is_asymmetric_and_pessimistic():
    # bounds 0.8 and 1.5: min(r A, clip(r) A), sign turned.
    cases = [
        (1.0, 2.0, -2.0, False),
        (1.4, 2.0, -2.8, False),
        (2.0, 2.0, -3.0, True),  # gain bounded at 1.5 A
        (0.5, 2.0, -1.0, False),  # lost probability of a good token: full gradient back
        (2.0, -2.0, 4.0, False),  # gained probability of a bad token: full gradient back
        (0.5, -2.0, 1.6, True),  # gain bounded at 0.8 A
    ]
    ratios, advantages, expected, indicator = zip(*cases)
    loss, metrics = clipped(loss_tokens(ratios, advantages), CONFIG)
    assert loss.tolist() == pytest.approx(list(expected))
    assert metrics["clip_fraction"].tolist() == list(indicator)
    assert metrics["clip_fraction_low"].tolist() == [False] * 5 + [True]


def test_clipped_gradient_is_minus_r_times_advantage_and_zero_where_clipped():
    tokens = loss_tokens([1.0, 1.2, 2.0, 0.5], [3.0, -1.0, 1.0, -1.0], requires_grad=True)
    assert gradient(clipped, tokens, CONFIG) == pytest.approx([-3.0, 1.2, 0.0, 0.0])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_gained_much():
    # c = 3: for A = -2 the loss is at most 6, reached at r = 3. Of a good token nothing changes.
    tokens = loss_tokens([2.0, 5.0, 5.0], [-2.0, -2.0, 2.0], requires_grad=True)
    loss, metrics = clipped(tokens, DUAL)
    assert loss.tolist() == pytest.approx([4.0, 6.0, -3.0])
    assert metrics["dual_clip_fraction"].tolist() == [False, True, False]
    assert gradient(clipped, tokens, DUAL) == pytest.approx([4.0, 0.0, 0.0])


def test_gspo_gives_every_token_of_a_rollout_the_geometric_mean_of_its_ratios():
    # Rollout 0: ratios 2 and 1/8, geometric mean 1/2; advantages 2, of which min(0.5, 0.8) A = 1 is kept. Rollout 1: 1.2.
    tokens = loss_tokens([2.0, 0.125, 1.2], [2.0, 2.0, -1.0], sequence=[0, 0, 1])
    loss, metrics = gspo(tokens, CONFIG)
    assert loss.tolist() == pytest.approx([-1.0, -1.0, 1.2])
    assert metrics["clip_fraction"].tolist() == [False, False, False]


def test_gspo_clips_a_rollout_as_a_whole():
    # Ratios 4 and 1: geometric mean 2, above 1.5, although the second token's own ratio is 1.
    tokens = loss_tokens([4.0, 1.0], [1.0, 1.0], sequence=[0, 0], requires_grad=True)
    loss, metrics = gspo(tokens, CONFIG)
    assert loss.tolist() == pytest.approx([-1.5, -1.5])
    assert metrics["clip_fraction"].tolist() == [True, True]
    assert gradient(gspo, tokens, CONFIG) == [0.0, 0.0]


def test_gspo_trains_each_token_by_its_own_advantage():
    # s = 1; +3, 0, -3 of one rollout: the gradient of s itself would be that of their sum, 0.
    tokens = loss_tokens([1.25, 1.0, 0.8], [3.0, 0.0, -3.0], sequence=[0] * 3, requires_grad=True)
    assert gradient(gspo, tokens, CONFIG) == pytest.approx([-3.0, 0.0, 3.0])


def test_gspo_spreads_the_gradient_of_the_mean_evenly():
    # s = 1 for both; d/dx_t of -(s A + s A) = -2 A s / 2 for each of two tokens.
    tokens = loss_tokens([1.25, 0.8], [3.0, 3.0], sequence=[0, 0], requires_grad=True)
    assert gradient(gspo, tokens, CONFIG) == pytest.approx([-3.0, -3.0])


def test_cispo_bounds_the_weight_and_never_cuts_the_gradient():
    # Weight min(r, 1.5), log pi = -1 + log r: loss -w A log pi, gradient -w A.
    tokens = loss_tokens([1.0, 2.0, 0.5, 4.0], [2.0, 2.0, -1.0, -1.0], requires_grad=True)
    loss, metrics = cispo(tokens, CONFIG)
    assert loss.tolist() == pytest.approx(
        [2.0, 3.0 * (1 - math.log(2)), -0.5 * (1 + math.log(2)), -1.5 * (1 - math.log(4))]
    )
    assert metrics["clip_fraction"].tolist() == [False, True, False, True]
    assert gradient(cispo, tokens, CONFIG) == pytest.approx([-2.0, -3.0, 0.5, 1.5])


def test_policy_gradient_ignores_the_ratio():
    tokens = loss_tokens([1.0, 7.0], [2.0, -3.0], requires_grad=True)
    assert gradient(policy_gradient, tokens, CONFIG) == pytest.approx([-2.0, 3.0])


@every_loss
def test_at_ratio_one_the_gradient_is_the_policy_gradient(loss, config):
    tokens = loss_tokens([1.0, 1.0], [0.7, -1.3], requires_grad=True)
    assert gradient(loss, tokens, config) == pytest.approx([-0.7, 1.3])


@pytest.mark.parametrize("name", ["clipped", "dual", "policy_gradient"])
def test_gradient_matches_finite_differences(name):
    loss, config = LOSSES[name]
    base = torch.tensor([-1.0, -2.0, -0.3, -4.0, -1.5], dtype=torch.float64)
    moved = torch.tensor([0.1, 0.9, -0.9, -0.1, 1.3], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5, -1.0, -1.0], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1, 2])
    torch.autograd.gradcheck(
        lambda x: loss(LossTokens(x, base, base, advantages, sequence), config)[0],
        ((base + moved).requires_grad_(),),
    )


def test_gspos_gradient_matches_finite_differences_where_a_rollout_has_one_advantage():
    """There the token form has the gradient of GSPO itself, ``-sum_t min(s A, clip(s) A)`` of one rollout."""
    base = torch.tensor([-1.0, -2.0, -0.3, -4.0, -1.5], dtype=torch.float64)
    moved = (base + torch.tensor([0.1, 0.2, -0.9, -0.1, 1.3])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 1, 1, 2])

    def whole(x):
        s = [(x - base)[sequence == n].mean().exp() for n in range(3)]
        terms = [torch.minimum(r * a, r.clamp(0.8, 1.5) * a) for r, a in zip(s, (1.0, -1.0, -1.0))]
        return -sum(n * term for n, term in zip((2, 2, 1), terms))

    torch.autograd.gradcheck(whole, (moved,))
    (expected,) = torch.autograd.grad(whole(moved), moved)
    gspo(LossTokens(moved, base, base, advantages, sequence), CONFIG)[0].sum().backward()
    torch.testing.assert_close(moved.grad, expected)


def test_cispo_s_gradient_matches_finite_differences_at_a_fixed_weight():
    # The weight is held where it was: differentiate -w A x with w made once from the log-probabilities.
    base = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64)
    x = (base + torch.tensor([0.1, 0.9, -0.9])).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    weight = (x - base).exp().clamp(max=1.5).detach()
    step = 1e-6
    numeric = [
        (-weight * advantages * (x + step) + weight * advantages * (x - step))[i] / (2 * step)
        for i in range(3)
    ]
    cispo(LossTokens(x, base, base, advantages, torch.arange(3)), CONFIG)[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.stack(numeric).detach())


log_probability = st.floats(-1e6, 0, width=32)


@every_loss
@given(
    logprobs=st.lists(log_probability, min_size=1, max_size=8),
    base=log_probability,
    advantage=st.floats(-1e3, 1e3, width=32),
)
def test_extreme_ratios_leave_loss_and_gradient_finite(loss, config, logprobs, base, advantage):
    x = torch.tensor(logprobs, requires_grad=True)
    fixed = torch.full_like(x, base).detach()
    sequence = torch.arange(len(logprobs)) // 2
    tokens = LossTokens(x, fixed, fixed, torch.full_like(fixed, advantage), sequence)
    value, _ = loss(tokens, config)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(x.grad).all()


@every_loss
@given(seed=st.integers(0, 99))
def test_the_order_of_tokens_and_the_labels_of_rollouts_do_not_matter(loss, config, seed):
    generator = torch.Generator().manual_seed(seed)
    fields = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(4)]
    sequence = torch.tensor([0, 0, 1, 1, 1, 2])
    order, relabel = torch.randperm(6, generator=generator), torch.tensor([2, 0, 1])
    straight, _ = loss(LossTokens(*fields, sequence), config)
    moved = LossTokens(*(field[order] for field in fields), relabel[sequence[order]])
    torch.testing.assert_close(loss(moved, config)[0], straight[order])


@every_loss
def test_rollouts_do_not_influence_each_other(loss, config):
    both = loss_tokens([1.1, 0.7, 1.4, 0.9], [1.0, 1.0, -2.0, -2.0], sequence=[0, 0, 1, 1])
    alone = loss_tokens([1.4, 0.9], [-2.0, -2.0], sequence=[0, 0])
    torch.testing.assert_close(loss(both, config)[0][2:], loss(alone, config)[0])


@every_loss
def test_a_batch_without_a_sampled_token_has_no_loss(loss, config):
    nothing = torch.zeros(0)
    value, _ = loss(LossTokens(*[nothing] * 4, torch.zeros(0, dtype=torch.long)), config)
    assert value.shape == (0,)


@every_loss
def test_a_log_probability_that_is_not_a_number_stays_visible(loss, config):
    fields = [torch.tensor([math.nan, -1.0]), *[torch.tensor([-1.0, -1.0])] * 3]
    value, _ = loss(LossTokens(*fields, torch.arange(2)), config)
    assert value.isnan().tolist() == [True, False]


def test_value_loss_takes_the_larger_error_of_the_value_and_the_clipped_one():
    # V_old 0, clip 0.2. V 1, G 2: (1-2)^2 = 1 against (0.2-2)^2 = 3.24. V 1, G 0: 1 against 0.04. V 0.1, G 1: 0.81 both.
    values = torch.tensor([1.0, 1.0, 0.1])
    loss, metrics = value_loss(values, torch.zeros(3), torch.tensor([2.0, 0.0, 1.0]), 0.2)
    assert loss.tolist() == pytest.approx([1.62, 0.5, 0.405])
    assert metrics["value_clip_fraction"].tolist() == [True, True, False]


@given(
    rows=st.lists(st.tuples(*[st.floats(-1e9, 1e9, width=32)] * 3), min_size=1, max_size=8),
    clip=st.floats(0, 1e3) | st.just(math.inf),
    seed=st.integers(0, 99),
)
def test_value_loss_is_finite_of_extreme_values_and_in_any_order(rows, clip, seed):
    values, old, returns = torch.tensor(rows).T
    values = values.clone().requires_grad_()
    loss, _ = value_loss(values, old, returns, clip)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(values.grad).all() and (loss >= 0).all()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    moved, _ = value_loss(values[order], old[order], returns[order], clip)
    torch.testing.assert_close(moved, loss[order])


def test_value_loss_gradient_matches_finite_differences():
    values = torch.tensor([1.0, 1.0, 0.1, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(4, dtype=torch.float64)
    returns = torch.tensor([2.0, 0.0, 1.0, -0.6], dtype=torch.float64)
    torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2)[0], (values,))


def test_explained_variance_is_what_is_left_of_the_spread_of_returns():
    # G 0, 2, 4 (variance 8/3), G - V 0, 1, -1 (variance 2/3): 1 - 1/4. A constant error is not seen, no knowledge is 0.
    returns = torch.tensor([0.0, 2.0, 4.0])
    assert explained_variance(torch.tensor([0.0, 1.0, 5.0]), returns) == pytest.approx(0.75)
    assert explained_variance(returns + 7, returns) == pytest.approx(1.0)
    assert explained_variance(torch.ones(3), returns) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(3)) is None
