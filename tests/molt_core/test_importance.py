"""Importance correction: weights by hand for each level, mode, gate and named scheme, and what must not be hidden."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.config import AlgorithmConfig, CorrectionConfig
from molt_core.algo.importance import correction, effective_sample_fraction, gate_statistic

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
    ((_, changed),) = metrics.items()
    assert changed.tolist() == indicator


def test_off_weighs_every_token_one():
    weights, metrics = weights_of("truncate", level="off")
    assert weights.tolist() == [1.0] * 5 and metrics == {}


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
    weight, _ = correction(torch.tensor([proximal]), torch.tensor([behaviour]), ONE, config)
    assert (config.low if mode == "clip" else 0.0) <= weight.item() <= 2.0


# Two rollouts. Ratios 2 and 1/2: product 1, geometric mean 1. Ratios 3, 3 and 1/3: product 3, geometric mean 3^(1/3) = 1.442.
UNEVEN = [2.0, 0.5, 3.0, 3.0, 1 / 3]
ROLLOUTS = torch.tensor([0, 0, 1, 1, 1])


def rollout_weights(ratios=UNEVEN, rollouts=ROLLOUTS, **fields) -> list[float]:
    behaviour = torch.full((len(ratios),), -3.0, dtype=torch.float64)
    proximal = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    return correction(proximal, behaviour, rollouts, CorrectionConfig(**fields))[0].tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(level="sequence", mode="truncate", high=2.0), [1, 1, 2, 2, 2]),
        (dict(level="sequence", mode="clip", low=0.5, high=2.5), [1, 1, 2.5, 2.5, 2.5]),
        (dict(level="sequence", mode="mask", high=2.0), [2, 0.5, 0, 0, 0]),
        (dict(level="geometric", mode="mask", high=1.5), UNEVEN),
        (dict(level="geometric", mode="mask", high=1.4), [2, 0.5, 0, 0, 0]),
        (
            dict(level="geometric", mode="mask", high=1.5, truncate_kept=2.5),
            [2, 0.5, 2.5, 2.5, 1 / 3],
        ),
    ],
)
def test_weights_of_whole_rollouts(fields, expected):
    assert rollout_weights(**fields) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheme", "ratios", "expected"),
    [
        ("tis", [0.1, 1.0, 2.5], [0.1, 1.0, 2.0]),
        ("icepop", [0.4, 0.6, 4.0, 6.0], [0.0, 0.6, 4.0, 0.0]),
        # Geometric means 1.005 and 1.02: the first rollout stays, its weights not above 2.
        ("sequence_masked_tis", [2.5, 1.005**2 / 2.5, 1.02, 1.02], [2.0, 0.40401, 0.0, 0.0]),
        ("off", [0.4, 6.0], [1.0, 1.0]),
    ],
)
def test_named_schemes(scheme, ratios, expected):
    behaviour = torch.full((len(ratios),), -9.0, dtype=torch.float64)
    proximal = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    rollouts = torch.arange(len(ratios)) // 2
    config = AlgorithmConfig(correction=scheme).correction
    assert correction(proximal, behaviour, rollouts, config)[0].tolist() == pytest.approx(expected)


# Behaviour and proximal probabilities 0.5 and 0.6, 0.01 and 0.02 (ratio 2), 0.9 and 0.6. TV: 0.1, 0.01, 0.3. Binary KL:
# 0.5 ln(5/6) + 0.5 ln(5/4) = 0.020411; 0.01 ln(1/2) + 0.99 ln(99/98) = 0.003119; 0.9 ln(3/2) + 0.1 ln(1/4) = 0.226289.
BEHAVIOUR = torch.tensor([0.5, 0.01, 0.9], dtype=torch.float64).log()
PROXIMAL = torch.tensor([0.6, 0.02, 0.6], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("gate", "level", "expected"),
    [
        ("tv", "token", [0.1, 0.01, 0.3]),
        ("binary_kl", "token", [0.020411, 0.003119, 0.226289]),
        ("tv", "sequence", [0.055, 0.055, 0.3]),
        ("binary_kl", "sequence", [0.011765, 0.011765, 0.226289]),
    ],
)
def test_gates_by_divergence(gate, level, expected):
    config = CorrectionConfig(level=level, mode="mask", gate=gate, high=0.5)
    rollouts = torch.tensor([0, 0, 1])
    found = gate_statistic(PROXIMAL, BEHAVIOUR, rollouts, config)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("scheme", ["tv", "binary_kl"])
def test_a_divergence_gate_keeps_the_rare_token_whose_ratio_is_large_and_its_weight(scheme):
    config = AlgorithmConfig(correction=scheme).correction
    weights, metrics = correction(PROXIMAL, BEHAVIOUR, torch.arange(3), config)
    assert weights.tolist() == pytest.approx([1.2, 2.0, 0.0])
    assert metrics["importance_masked"].tolist() == [False, False, True]


every_setting = pytest.mark.parametrize(
    "config",
    [
        CorrectionConfig(level="token", mode="clip", low=0.5),
        CorrectionConfig(level="sequence", mode="truncate"),
        CorrectionConfig(level="sequence", mode="mask", low=0.5),
        CorrectionConfig(level="geometric", mode="mask", low=0.99, high=1.01, truncate_kept=2.0),
        CorrectionConfig(level="token", mode="mask", gate="binary_kl", high=0.05),
        CorrectionConfig(level="sequence", mode="mask", gate="tv", high=0.2),
        CorrectionConfig(level="sequence", mode="clip", low=0.5),
        CorrectionConfig(level="sequence", mode="mask", gate="binary_kl", high=0.05),
        CorrectionConfig(level="token", mode="mask", gate="tv", high=0.2),
    ],
    ids=lambda config: f"{config.level}-{config.mode}-{config.gate}",
)


@every_setting
@given(seed=st.integers(0, 99))
def test_the_order_of_tokens_and_the_labels_of_rollouts_do_not_matter(config, seed):
    generator = torch.Generator().manual_seed(seed)
    proximal, behaviour = -torch.rand(2, 6, generator=generator, dtype=torch.float64)
    rollouts = torch.tensor([0, 0, 1, 1, 1, 2])
    order, relabel = torch.randperm(6, generator=generator), torch.tensor([2, 0, 1])
    straight, _ = correction(proximal, behaviour, rollouts, config)
    moved, _ = correction(proximal[order], behaviour[order], relabel[rollouts[order]], config)
    torch.testing.assert_close(moved, straight[order])


@every_setting
@given(values=st.lists(st.floats(-1e6, 0, width=32), min_size=2, max_size=8))
def test_extreme_ratios_leave_weights_finite(config, values):
    proximal = torch.tensor(values)
    weights, metrics = correction(
        proximal, proximal.flip(0), torch.arange(len(values)) // 2, config
    )
    assert torch.isfinite(weights).all() and (weights >= 0).all()
    assert all(torch.isfinite(value).all() for value in metrics.values())


@every_setting
def test_a_batch_without_a_sampled_token_has_no_weights(config):
    nothing = torch.zeros(0)
    assert correction(nothing, nothing, nothing.long(), config)[0].shape == (0,)


def test_effective_sample_fraction():
    # Weights 1, 1, 2: (4)^2 / (3 * 6) = 8/9. One token carries all of four: 1/4.
    assert effective_sample_fraction(4.0, 6.0, 3) == pytest.approx(8 / 9)
    assert effective_sample_fraction(2.0, 4.0, 4) == pytest.approx(1 / 4)
    assert effective_sample_fraction(0.0, 0.0, 4) == 0.0
