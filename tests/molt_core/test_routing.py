"""Routers: float32 under any precision, the choice by hand, sums and metrics by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from molt_core.train.routing import Choice, Router, choose, routing_metrics, routing_sums


def test_a_router_computes_in_float32_from_bfloat16_weights_and_states():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 64, generator=generator).bfloat16())
    hidden = torch.randn(50, 64, generator=generator).bfloat16()
    logits, weights, _ = Router(weight, 2)(hidden)
    assert logits.dtype == weights.dtype == torch.float32
    exact = hidden.double() @ weight.double().T
    rounded = (hidden @ weight.T).double()
    assert (logits - exact).abs().max() < 1e-4 < (rounded - exact).abs().max()


def test_the_weights_are_the_softmax_over_all_renormalised_over_the_chosen():
    # Probabilities 1/2, 1/4, 1/8, 1/8: the two best weigh 2/3 and 1/3.
    weight = nn.Parameter(torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().T.contiguous())
    _, weights, experts = Router(weight, 2)(torch.ones(1, 1))
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3]]))


def test_a_record_stands_in_place_of_the_best_unless_it_is_minus_one():
    logits = torch.tensor([[4.0, 3.0, 1.0, 0.0], [0.0, 1.0, 3.0, 4.5]])
    choice = choose(logits, 2, torch.tensor([[3, 2], [-1, -1]]))
    assert choice.natural.tolist() == [[0, 1], [3, 2]]
    assert choice.chosen.tolist() == [[3, 2], [3, 2]]
    assert choice.gap.tolist() == [2.0, 2.0]


def test_where_every_expert_is_chosen_nothing_ties():
    assert choose(torch.zeros(1, 2), 2).gap.tolist() == [np.inf]


def choices(natural, chosen) -> Choice:
    return Choice(torch.tensor(natural), torch.tensor(chosen), torch.ones(len(natural)), experts=4)


def test_sums_by_hand():
    # Three tokens; the last has no record. In layer 1 the first token's best two are others, in another order they are not.
    record = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[-1, -1], [-1, -1]]])
    layers = [
        choices([[0, 1], [1, 0], [2, 3]], [[0, 1], [0, 1], [2, 3]]),
        choices([[2, 0], [3, 2], [0, 1]], [[2, 3], [2, 3], [0, 1]]),
    ]
    sums = routing_sums(layers, record)
    assert sums["expert_tokens"].tolist() == [[2, 2, 1, 1], [1, 1, 2, 2]]
    assert sums["router_recorded"] == 2
    assert sums["router_changed"].tolist() == [0, 1]
    assert "router_recorded" not in routing_sums(layers, None)
    assert routing_sums((), record) == {}


def test_metrics_weigh_every_token_alike_over_micro_batches():
    sums = {
        "expert_tokens": np.array([[6.0, 2.0], [4.0, 4.0]]),
        "router_recorded": 8.0,
        "router_changed": np.array([2.0, 0.0]),
        "other": 1.0,
    }
    fields = routing_metrics(sums)
    assert fields["expert_load_max"] == pytest.approx({0: 1.5, 1: 1.0})
    assert fields["router_disagreement"] == pytest.approx({0: 0.25, 1: 0.0})
    assert sums == {"other": 1.0}
    assert routing_metrics(sums) == {}
