"""The KL estimators by hand, and what their docstring's table says of each: which value, which gradient."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.kl import k1, k2, k3, kl_loss, next_coefficient

LOGITS = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
OTHER = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()


def test_estimators_by_hand():
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


def gradient(of) -> torch.Tensor:
    """By the logits, of a function of the policy's log-probabilities of all three ids."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(of(logits.log_softmax(0)), logits)[0]


def expected_under_policy(estimator):
    return gradient(lambda x: (x.exp().detach() * estimator(x, OTHER)).sum())


policy_to_base = gradient(lambda x: (x.exp() * (x - OTHER)).sum())
base_to_policy = gradient(lambda x: (OTHER.exp() * (OTHER - x)).sum())


@pytest.mark.parametrize(
    ("estimator", "exact"),
    [(k1, torch.zeros(3, dtype=torch.float64)), (k2, policy_to_base), (k3, base_to_policy)],
)
def test_gradient_as_a_loss_under_samples_of_the_policy(estimator, exact):
    torch.testing.assert_close(expected_under_policy(estimator), exact)


@pytest.mark.parametrize(("estimator", "is_exact"), [(k1, True), (k2, False), (k3, False)])
def test_gradient_as_a_reward(estimator, is_exact):
    # Score function with the penalty as a constant: sum_x pi(x) k(x) d log pi(x).
    found = gradient(lambda x: (x.exp().detach() * estimator(x, OTHER).detach() * x).sum())
    assert torch.allclose(found, policy_to_base) is is_exact


def test_against_the_behaviour_policy_k3_has_the_exact_gradient_and_k1_the_wrong_sign():
    def under_behaviour(estimator):
        return gradient(lambda x: (OTHER.exp() * estimator(x)).sum())

    k3_loss = under_behaviour(lambda x: kl_loss("k3", x, OTHER, sampled_from_base=True))
    torch.testing.assert_close(k3_loss, base_to_policy)
    # log pi - log mu, minimised over tokens of mu, walks away from mu.
    torch.testing.assert_close(under_behaviour(lambda x: k1(x, OTHER)), -base_to_policy)


def test_against_the_behaviour_policy_k2_is_exact_to_first_order():
    near = (LOGITS + torch.tensor([1e-4, -2e-4, 3e-4])).log_softmax(0)
    found = gradient(lambda x: (near.exp() * kl_loss("k2", x, near, sampled_from_base=True)).sum())
    exact = gradient(lambda x: (near.exp() * (near - x)).sum())
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("sampled_from_base", [True, False])
def test_penalty_gradient_matches_finite_differences(estimator, sampled_from_base):
    x = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([-1.2, -0.5, -0.3], dtype=torch.float64)
    torch.autograd.gradcheck(lambda v: kl_loss(estimator, v, base, sampled_from_base), (x,))


@pytest.mark.parametrize("estimator", [k2, k3])
@given(a=st.floats(-(2.0**80), 0, width=32), b=st.floats(-(2.0**80), 0, width=32))
def test_k2_and_k3_are_finite_and_not_negative_for_any_pair(estimator, a, b):
    value = estimator(torch.tensor([a]), torch.tensor([b]))
    assert torch.isfinite(value).all() and value.item() >= -1e-6


# A coefficient of 0.1, a target of 0.02 nats a token, the paper's gain of 0.1.
@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.02, 0.1),  # at the target
        (0.022, 0.101),  # a tenth above it: e = 0.1
        (0.017, 0.0985),  # e = -0.15
        (0.0, 0.098),  # e is cut at -0.2, as at the first step, where the policy is the reference
        (5.0, 0.102),  # and at 0.2
        (math.inf, 0.102),
    ],
)
def test_the_controller_by_hand(measured, expected):
    found = next_coefficient(0.1, measured, target=0.02, gain=0.1)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_horizon_in_episodes_is_a_gain():
    # 512 episodes a step, horizon 10,000, KL twice the target: 1 + 0.2 * 512 / 10,000 = 1.01024.
    assert next_coefficient(1.0, 12.0, target=6.0, gain=512 / 10_000) == pytest.approx(1.01024)


POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@given(POSITIVE, st.floats(min_value=0), POSITIVE, st.floats(1e-6, 1))
def test_the_coefficient_stays_a_positive_number_and_moves_towards_the_target(
    coef, measured, target, gain
):
    found = next_coefficient(coef, measured, target, gain)
    assert 0 < found < math.inf
    normal = sys.float_info.min <= coef <= sys.float_info.max / 2
    if normal and measured > target:
        assert coef <= found <= coef * (1 + 0.2 * gain) * (1 + 1e-12)
    elif normal and found != sys.float_info.min:
        assert coef * (1 - 0.2 * gain) * (1 - 1e-12) <= found <= coef


def test_a_controlled_kl_comes_to_its_target_and_stays():
    """A policy whose KL is 0.05 / coef: at 0.1 a coefficient of 0.5 holds it."""
    coef = 0.1
    for _ in range(400):
        coef = next_coefficient(coef, 0.05 / coef, target=0.1, gain=0.1)
    assert coef == pytest.approx(0.5, rel=1e-3)


def test_a_kl_that_is_no_number_steers_nothing():
    with pytest.raises(ValueError, match="is no number; algorithm.kl.target needs one"):
        next_coefficient(0.1, math.nan, target=0.02, gain=0.1)
