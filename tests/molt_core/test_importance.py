"""Importance correction: weights by hand for each mode, and what must not be hidden."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.config import CorrectionConfig
from molt_core.algo.importance import correction, effective_sample_fraction

ONE, TWO = torch.tensor([0]), torch.tensor([0, 1])
RATIOS = [0.25, 0.5, 1.0, 2.0, 4.0]


def weights_of(mode: str, ratios=RATIOS, low=0.0, high=2.0, level="token"):
    behaviour = torch.full((len(ratios),), -3.0)
    proximal = behaviour + torch.tensor(ratios).log()
    config = CorrectionConfig(level=level, mode=mode, low=low, high=high)
    return correction(proximal, behaviour, torch.arange(len(ratios)), config)


@pytest.mark.parametrize(
    ("mode", "expected", "indicator"),
    [
        ("truncate", [0.25, 0.5, 1, 1.5, 1.5], [False, False, False, True, True]),
        ("clip", [0.4, 0.5, 1, 1.5, 1.5], [True, False, False, True, True]),
        ("mask", [0, 0.5, 1, 0, 0], [True, False, False, True, True]),
    ],
)
def test_token_weights(mode, expected, indicator):
    weights, metrics = weights_of(mode, low=0.0 if mode == "truncate" else 0.4, high=1.5)
    assert weights.tolist() == pytest.approx(expected)
    (name,) = set(metrics) - {"importance_ratio", "importance_weight", "importance_weight_squared"}
    assert metrics[name].tolist() == indicator
    assert metrics["importance_ratio"].tolist() == pytest.approx(RATIOS)


def test_off_weighs_every_token_one_and_still_shows_the_ratio():
    weights, metrics = weights_of("truncate", level="off")
    assert weights.tolist() == [1.0] * 5
    assert metrics["importance_ratio"].tolist() == pytest.approx(RATIOS)


def test_weights_carry_no_gradient():
    proximal = torch.tensor([-1.0], requires_grad=True)
    weights, _ = correction(proximal, torch.tensor([-2.0]), ONE, CorrectionConfig())
    assert not weights.requires_grad


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_log_probability_that_the_engine_did_not_give_is_an_error(value):
    with pytest.raises(ValueError, match="not finite"):
        correction(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, value]), TWO, CorrectionConfig())


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_a_trainer_log_probability_that_is_not_a_number_is_not_masked_away(mode):
    config = CorrectionConfig(mode=mode, low=0.0 if mode == "truncate" else 0.5, high=2)
    weights, _ = correction(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), TWO, config)
    assert weights.isnan().tolist() == [True, False]


@given(
    proximal=st.floats(-1e6, 0, width=32),
    behaviour=st.floats(-1e6, 0, width=32),
    mode=st.sampled_from(["truncate", "clip", "mask"]),
)
def test_weights_stay_within_their_bounds(proximal, behaviour, mode):
    config = CorrectionConfig(mode=mode, low=0.0 if mode == "truncate" else 0.5, high=2)
    weight, metrics = correction(torch.tensor([proximal]), torch.tensor([behaviour]), ONE, config)
    assert (config.low if mode == "clip" else 0.0) <= weight.item() <= 2.0
    assert torch.isfinite(metrics["importance_ratio"]).all()


def test_effective_sample_fraction():
    # Weights 1, 1, 2: (4)^2 / (3 * 6) = 8/9. One token carries all of four: 1/4.
    assert effective_sample_fraction(4.0, 6.0, 3) == pytest.approx(8 / 9)
    assert effective_sample_fraction(2.0, 4.0, 4) == pytest.approx(1 / 4)
    assert effective_sample_fraction(0.0, 0.0, 4) == 0.0
