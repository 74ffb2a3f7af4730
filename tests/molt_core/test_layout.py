"""Expert layouts: hand-worked transposes, and that nothing but experts is touched."""

import pytest
import torch

from molt_core.models.layout import check_layout_is_decidable, from_published, to_published

GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"


def test_published_gate_up_is_hidden_by_twice_expert_size():
    experts, expert_size, hidden = 2, 3, 5
    in_memory = torch.arange(experts * 2 * expert_size * hidden).reshape(
        experts, 2 * expert_size, hidden
    )
    published = to_published(GATE_UP, in_memory)
    assert published.shape == (experts, hidden, 2 * expert_size)
    # element [expert 1, output row 4, input 2] of the nn.Linear-like layout: 1 * 30 + 4 * 5 + 2
    assert published[1, 2, 4] == 52


def test_published_down_is_expert_size_by_hidden_and_contiguous():
    in_memory = torch.randn(2, 5, 3)
    published = to_published(DOWN, in_memory)
    assert published.shape == (2, 3, 5)
    assert published.is_contiguous()


@pytest.mark.parametrize("name", [GATE_UP, DOWN])
def test_round_trip_is_exact(name):
    tensor = torch.randn(4, 6, 5)
    assert torch.equal(from_published(name, to_published(name, tensor)), tensor)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.language_model.layers.0.mlp.gate.weight"]
)
def test_other_weights_are_left_alone(name):
    tensor = torch.randn(4, 6)
    assert to_published(name, tensor) is tensor


def test_wrong_rank_of_an_expert_weight_is_refused():
    with pytest.raises(ValueError, match="three dimensions"):
        to_published(DOWN, torch.randn(3, 4))


@pytest.mark.parametrize("expert_size", [64, 32])
def test_ambiguous_sizes_are_refused(expert_size):
    with pytest.raises(ValueError, match="same"):
        check_layout_is_decidable(hidden_size=64, expert_size=expert_size)
