"""The clipped loss and the KL estimators against numbers worked by hand, and numerical gradients in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.config import AlgorithmConfig
from molt_core.algo.kl import k1, k2, k3
from molt_core.algo.losses import LossTokens, clipped

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.5)


def loss_tokens(ratios, advantages, requires_grad=False) -> LossTokens:
    logprobs = torch.tensor(ratios, dtype=torch.float64).log() - 1
    base = torch.full_like(logprobs, -1)
    advantages = torch.tensor(advantages, dtype=torch.float64)
    each = torch.arange(len(ratios))
    return LossTokens(logprobs.requires_grad_(requires_grad), base, base, advantages, each)


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
    assert metrics["clipped"].tolist() == list(indicator)


def test_gradient_is_minus_r_times_advantage_and_zero_where_clipped():
    tokens = loss_tokens([1.0, 1.2, 2.0, 0.5], [3.0, -1.0, 1.0, -1.0], requires_grad=True)
    clipped(tokens, CONFIG)[0].sum().backward()
    assert tokens.logprobs.grad.tolist() == pytest.approx([-3.0, 1.2, 0.0, 0.0])


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3])
    fixed = logprobs.detach()
    tokens = LossTokens(logprobs, fixed, fixed, advantages, torch.arange(2))
    clipped(tokens, CONFIG)[0].sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.7, 1.3])


def test_gradient_matches_finite_differences():
    base = torch.tensor([-1.0, -2.0, -0.3, -4.0], dtype=torch.float64)
    logprobs = (base + torch.tensor([0.1, 0.9, -0.9, -0.1])).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5, -1.0], dtype=torch.float64)
    torch.autograd.gradcheck(
        lambda x: clipped(LossTokens(x, base, base, advantages, torch.arange(4)), CONFIG)[0],
        (logprobs,),
    )


@given(
    logprobs=st.lists(st.floats(-1e6, 0, width=32), min_size=1, max_size=8),
    base=st.floats(-1e6, 0, width=32),
    advantage=st.floats(-1e3, 1e3, width=32),
)
def test_extreme_ratios_leave_loss_and_gradient_finite(logprobs, base, advantage):
    x = torch.tensor(logprobs, requires_grad=True)
    fixed = torch.full_like(x, base).detach()
    each = torch.arange(len(logprobs))
    loss, _ = clipped(LossTokens(x, fixed, fixed, torch.full_like(fixed, advantage), each), CONFIG)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(x.grad).all()


@given(seed=st.integers(0, 99))
def test_tokens_do_not_influence_each_other(seed):
    generator = torch.Generator().manual_seed(seed)
    fields = [torch.randn(6, generator=generator) for _ in range(4)] + [torch.arange(6)]
    order = torch.randperm(6, generator=generator)
    straight, _ = clipped(LossTokens(*fields), CONFIG)
    shuffled, _ = clipped(LossTokens(*(field[order] for field in fields)), CONFIG)
    assert torch.equal(shuffled, straight[order])


def test_a_log_probability_that_is_not_a_number_stays_visible():
    fields = [torch.tensor([math.nan, -1.0]), *[torch.tensor([-1.0, -1.0])] * 3, torch.arange(2)]
    assert clipped(LossTokens(*fields), CONFIG)[0].isnan().tolist() == [True, False]


def test_kl_estimators_by_hand():
    # pi = 0.5, base = 0.25: log ratio log 2; r = base / pi = 1/2, k3 = 1/2 - 1 + log 2.
    pi, base = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert k1(pi, base).item() == pytest.approx(0.6931472)
    assert k2(pi, base).item() == pytest.approx(0.2402265)
    assert k3(pi, base).item() == pytest.approx(0.1931472)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased_for_the_kl_of_policy_to_base(estimator):
    pi, base = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = 0.7 * math.log(0.7 / 0.3) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.4)
    assert (pi * estimator(pi.log(), base.log())).sum().item() == pytest.approx(exact)


def test_only_k2_has_the_gradient_of_the_kl_as_a_loss():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()

    def gradient(of):
        logprobs = logits.log_softmax(0)
        return torch.autograd.grad(of(logprobs), logits)[0]

    exact = gradient(lambda x: (x.exp() * (x - base)).sum())
    expected = {k1: torch.zeros(3, dtype=torch.float64), k2: exact}
    for estimator, right in expected.items():
        got = gradient(lambda x, k=estimator: (x.exp().detach() * k(x, base)).sum())
        torch.testing.assert_close(got, right)
    assert not torch.allclose(gradient(lambda x: (x.exp().detach() * k3(x, base)).sum()), exact)
