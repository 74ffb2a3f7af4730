"""Schedules by hand, and the size of a step against the weights before and after it."""

import math

import pytest
import torch

from molt_core.config import OptimizerConfig
from molt_core.train import optimizer
from molt_core.train.optimizer import lr_factor, squared_update_and_weight


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        # Four steps after the warm-up: 1, 3/4, 1/2, 1/4.
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        # (1 + cos(pi t)) / 2 at t = 0, 1/4, 1/2, 3/4.
        ("cosine", [0.5, 1, 1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4]),
    ],
)
def test_two_steps_of_warm_up_and_four_of_schedule(schedule, expected):
    config = OptimizerConfig(schedule=schedule, warmup_steps=2)
    assert [lr_factor(step, 6, config) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize("chunk", [1, 10, 10**6])
def test_what_a_step_added_is_found_from_the_moments(chunk, monkeypatch):
    monkeypatch.setattr(optimizer, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (5,), (2, 2, 2), (7,))
    weights = [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]
    groups = [{"params": weights[:2], "weight_decay": 0.5}, {"params": weights[2:], "lr": 0.1}]
    adamw = torch.optim.AdamW(groups, lr=0.2, betas=(0.8, 0.9), weight_decay=0.0)
    weights[3].requires_grad_(False)  # never stepped, and not counted
    for _ in range(3):
        before = [weight.detach().clone() for weight in weights]
        for weight in weights[:3]:
            weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        adamw.step()
    squares = squared_update_and_weight(adamw)
    added = sum(float((w - b).square().sum().detach()) for w, b in zip(weights, before))
    size = sum(float(w.square().sum().detach()) for w in weights[:3])
    assert squares.tolist() == pytest.approx([added, size], rel=1e-9)
    only = squared_update_and_weight(adamw, lambda parameter: parameter.dim() == 1)
    assert only[1] == pytest.approx(float(weights[1].square().sum().detach()))
