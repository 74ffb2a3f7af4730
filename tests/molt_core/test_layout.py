"""Expert layouts: hand-worked places of single numbers, and that nothing but experts is touched."""

import json

import pytest
import torch

from molt_core.models.layout import (
    ARCHITECTURES,
    Architecture,
    check_layout_is_decidable,
    names_in_memory,
)

STACKED, SEPARATE = ARCHITECTURES["qwen3_vl_moe"], ARCHITECTURES["qwen3_moe"]
EXPERTS, EXPERT_SIZE, HIDDEN = 2, 3, 5
BLOCK = "model.layers.0.mlp.experts"


def stacked_tensor(rows: int, columns: int) -> torch.Tensor:
    """Element [expert, row, column] is its place in the whole."""
    return torch.arange(EXPERTS * rows * columns).reshape(EXPERTS, rows, columns)


GATE_UP = {f"{BLOCK}.gate_up_proj": stacked_tensor(2 * EXPERT_SIZE, HIDDEN)}
DOWN = {f"{BLOCK}.down_proj": stacked_tensor(HIDDEN, EXPERT_SIZE)}


def published(architecture, weights) -> dict[str, torch.Tensor]:
    return dict(architecture.published(weights.items()))


def test_stacked_gate_up_is_hidden_by_twice_expert_size():
    (tensor,) = published(STACKED, GATE_UP).values()
    assert tensor.shape == (EXPERTS, HIDDEN, 2 * EXPERT_SIZE)
    # element [expert 1, output row 4, input 2] of the nn.Linear-like layout: 1 * 30 + 4 * 5 + 2
    assert tensor[1, 2, 4] == 52


def test_stacked_down_is_expert_size_by_hidden():
    (tensor,) = published(STACKED, DOWN).values()
    assert tensor.shape == (EXPERTS, EXPERT_SIZE, HIDDEN)


def test_separate_experts_are_rows_of_the_stacked_tensor_gate_before_up():
    tensors = published(SEPARATE, GATE_UP)
    assert list(tensors) == [
        f"{BLOCK}.{expert}.{half}_proj.weight" for expert in (0, 1) for half in ("gate", "up")
    ]
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(EXPERT_SIZE, HIDDEN)}
    # row 1, column 2 of expert 1: gate 1 * 30 + 1 * 5 + 2, up three rows of 5 after it
    assert tensors[f"{BLOCK}.1.gate_proj.weight"][1, 2] == 37
    assert tensors[f"{BLOCK}.1.up_proj.weight"][1, 2] == 52


def test_separate_down_is_hidden_by_expert_size():
    tensors = published(SEPARATE, DOWN)
    assert list(tensors) == [f"{BLOCK}.0.down_proj.weight", f"{BLOCK}.1.down_proj.weight"]
    # row 4, column 2 of expert 1: 1 * 15 + 4 * 3 + 2
    assert tensors[f"{BLOCK}.1.down_proj.weight"][4, 2] == 29


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_published_experts_are_no_copies_and_their_names_lead_back(architecture):
    for weights in (GATE_UP, DOWN):
        (in_memory,), tensors = weights.values(), published(architecture, weights)
        memory = in_memory.untyped_storage().data_ptr()
        assert {t.untyped_storage().data_ptr() for t in tensors.values()} == {memory}
        assert names_in_memory(["lm_head.weight", *tensors]) == {"lm_head.weight", *weights}


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.down_proj.weight"],
)
def test_other_weights_are_left_alone(architecture, name):
    tensor = torch.randn(4, 6)
    assert published(architecture, {name: tensor})[name] is tensor


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_wrong_rank_of_an_expert_weight_is_refused(architecture):
    with pytest.raises(ValueError, match="three dimensions"):
        published(architecture, {f"{BLOCK}.down_proj": torch.randn(3, 4)})


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
@pytest.mark.parametrize("weights", [GATE_UP, DOWN], ids=["gate and up", "down"])
def test_files_that_are_as_published_are_accepted(architecture, weights, tmp_path):
    shapes = {n: tuple(t.shape) for n, t in published(architecture, weights).items()}
    architecture.check_files(shapes, HIDDEN, tmp_path)


@pytest.mark.parametrize("weights", [GATE_UP, DOWN], ids=["gate and up", "down"])
@pytest.mark.parametrize(
    "architecture, lie",
    [
        (STACKED, lambda weights: published(SEPARATE, weights)),
        (STACKED, dict),  # as transformers saves them
        (SEPARATE, lambda weights: published(STACKED, weights)),
        (SEPARATE, dict),
    ],
)
def test_files_of_another_layout_are_refused_by_name_and_told_the_right_one(
    architecture, lie, weights, tmp_path
):
    shapes = {name: tuple(tensor.shape) for name, tensor in lie(weights).items()}
    first = f"model.path: {tmp_path} holds {next(iter(shapes))}"
    with pytest.raises(ValueError, match=f"{first} .* {architecture.model_type} have experts"):
        architecture.check_files(shapes, HIDDEN, tmp_path)


def test_an_unknown_type_is_refused_in_one_line_that_names_the_known_ones(tmp_path):
    about = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(about))
    said = "^model.path: .* holds a 'qwen3' model .* supported are [^\n]*'qwen3_vl_moe' or 'qwen3_moe'$"
    with pytest.raises(ValueError, match=said):
        Architecture.of(tmp_path)


@pytest.mark.parametrize("expert_size", [64, 32])
def test_ambiguous_sizes_are_refused(expert_size):
    with pytest.raises(ValueError, match="same"):
        check_layout_is_decidable(hidden_size=64, expert_size=expert_size)
