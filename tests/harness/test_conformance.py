"""Three steps of two trainers: equal ones pass, a small fault fails and is named."""

import json
import re

import numpy as np
import pytest
import yaml

from harness.conformance import (
    STEPS,
    TOLERANCES,
    check_comparable,
    conformance,
    finite_only,
    main,
    synthetic_rows,
    verdict,
    with_routes,
)
from molt_core.config import RunConfig
from molt_core.models.load import excluded_token_ids
from molt_core.models.tiny import build_tiny_qwen3_moe, build_tiny_qwen3_vl_moe

MEGATRON = "harness.baselines.megatron_core:MegatronCoreBackend"
WRONG = "tests.harness.wrong_trainers:"


def run_config(backend="fsdp2", lr=1e-3, **trainer) -> dict:
    return {
        "model": {"builtin": "tiny-qwen3-vl-moe"},
        "task": {"source": "shapes"},
        "optimizer": {"lr": lr, "weight_decay": 0.01},
        "trainer": {"backend": backend, **trainer},
    }


def config(*arguments, **options) -> RunConfig:
    return RunConfig.model_validate(run_config(*arguments, **options))


def arm(**changes) -> dict:
    equal = {
        "logprobs": [-1.0, -2.0],
        "loss": [0.1, 0.2, 0.3],
        "grad_norm": [1.0, 2.0, 3.0],
        "mean_advantage": 0.5,
    }
    return {**equal, **changes}


def weights(**changes) -> dict:
    equal = {
        "update_difference": 0.0,
        "update_tensor_difference": 0.0,
        "worst_tensor": "lm_head.weight",
        "largest_update": 3e-3,
    }
    return {**equal, **changes}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("tiny") / "policy")


def test_equal_arms_pass():
    result = verdict([arm(), arm()], weights(), "float32")
    assert result["passed"] and result["reasons"] == []
    assert result["grad_norm_difference"] == 0


@pytest.mark.parametrize(
    "name, a, moved",
    [
        ("logprob_difference", {"logprobs": [-1.0, -2.00002]}, {}),
        ("loss_difference", {"loss": [0.1, 0.20001, 0.3]}, {}),
        ("grad_norm_difference", {"grad_norm": [1.0, 2.0, 3.001]}, {}),
        ("grad_norm_difference", {"grad_norm": [1.0, float("nan"), 3.0]}, {}),
        ("update_difference", {}, {"update_difference": 0.002}),
        ("update_tensor_difference", {}, {"update_tensor_difference": 0.006}),
    ],
)
def test_a_difference_beyond_its_bound_fails_and_is_named(name, a, moved):
    result = verdict([arm(**a), arm()], weights(**moved), "float32")
    assert not result["passed"]
    assert len(result["reasons"]) == 1 and result["reasons"][0].startswith(f"{name} is ")
    assert name in result["detail"]


def test_weights_that_did_not_move_prove_nothing():
    result = verdict([arm(), arm()], weights(largest_update=0.0), "float32")
    assert not result["passed"] and "did not move" in result["detail"]


def test_arms_that_differ_in_the_protocol_are_not_compared():
    with pytest.raises(ValueError, match=r"differ in \['optimizer'\]"):
        check_comparable(config(lr=1e-3), config(lr=2e-3))
    check_comparable(config(), config(MEGATRON))


def test_the_batch_has_what_goes_wrong_and_nothing_that_was_excluded(checkpoint):
    rows = synthetic_rows(checkpoint, 128)
    assert {len(row.images) for row in rows} == {0, 1, 2}
    assert len({len(row.token_ids) for row in rows}) > 5
    sampled = np.concatenate([row.token_ids[row.action_mask] for row in rows])
    assert not set(sampled) & set(excluded_token_ids(checkpoint))
    for row in rows:
        for image in row.images:
            inside = row.token_ids[image.start : image.start + image.length]
            assert len(set(inside)) == 1 and row.token_ids[image.start - 1] != inside[0]
            assert len(image.patches) == 4 * image.length


def test_the_batch_of_a_policy_of_text_has_no_images(tmp_path):
    rows = synthetic_rows(build_tiny_qwen3_moe(tmp_path), 128)
    assert len(rows) == 16 and not any(row.images for row in rows)


def test_recorded_rows_have_two_different_experts_everywhere_but_at_the_last_token(checkpoint):
    for row in with_routes(synthetic_rows(checkpoint, 128), checkpoint):
        assert row.routed_experts.shape == (len(row.token_ids), 2, 2)
        assert (row.routed_experts[-1] == -1).all()
        computed = row.routed_experts[:-1]
        assert computed.min() >= 0 and computed.max() < 8
        assert (computed[..., 0] != computed[..., 1]).all()


def test_rows_longer_than_the_model_allows_are_left_out(checkpoint):
    rows = synthetic_rows(checkpoint, 20)
    assert rows and max(len(row.token_ids) for row in rows) <= 20
    with pytest.raises(ValueError, match="model.max_length 3"):
        synthetic_rows(checkpoint, 3)


@pytest.mark.distributed
@pytest.mark.parametrize("replay", [False, True])
def test_megatron_core_and_fsdp2_make_the_same_update(checkpoint, tmp_path, replay):
    """From the command line, as the harness calls it; the candidate on two ranks."""
    for name, backend, size in (("a", MEGATRON, 1), ("b", "fsdp2", 2)):
        arm = run_config(backend, world_size=size, micro_batch_rows=5)
        arm["model"]["routing_replay"] = replay
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(arm))
    out = tmp_path / "conformance.json"
    main(tmp_path / "a.yaml", tmp_path / "b.yaml", checkpoint, out)
    result = json.loads(out.read_text())
    assert result["passed"], result["detail"]
    assert [len(arm["loss"]) for arm in result["arms"]] == [STEPS, STEPS]
    assert result["largest_update"] == pytest.approx(3 * 1e-3, rel=0.1)
    assert 0 < result["update_difference"] < TOLERANCES["float32"].update


@pytest.mark.distributed
@pytest.mark.parametrize(
    "wrong, symptom",
    [
        ("DecaysEverything", r"update_tensor_difference is 0.0\d+, its bound 0.005 \(.*norm"),
        ("AveragesGradients", r"grad_norm_difference is 0\.(49|5)"),
    ],
)
def test_a_trainer_with_a_fault_fails(checkpoint, wrong, symptom):
    result = conformance(config(WRONG + wrong), config(), checkpoint)
    assert not result["passed"]
    assert re.search(symptom, result["detail"])


def test_figures_that_are_no_numbers_become_none():
    found = finite_only(
        {"a": float("inf"), "b": [float("nan"), 1.0], "c": {"d": float("-inf"), "e": 2}}
    )
    assert found == {"a": None, "b": [None, 1.0], "c": {"d": None, "e": 2}}
