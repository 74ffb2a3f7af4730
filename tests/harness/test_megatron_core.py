"""The Megatron-Core baseline against transformers and torch's AdamW, from weights that make a wrong mapping show."""

import copy
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.baselines import megatron_core
from harness.baselines.megatron_core import MegatronCoreBackend
from harness.baselines.megatron_model import check_supported
from molt_core.config import OptimizerConfig, TrainerConfig
from molt_core.models.load import load_policy
from molt_core.train.backend import TrainBackend
from molt_core.train.collate import collate
from molt_core.train.split import filler_row
from molt_core.train.weights import whole_weights
from tests.harness.trainer_cases import (
    MODEL,
    OPTIMIZER,
    STEPS,
    advantages,
    backend_logprobs,
    backend_step,
    backend_training,
    disturbed_training,
    given_out,
    kept_bytes,
    largest_difference,
    oracle_logits,
    oracle_training,
    rescaled_checkpoint,
    token_logprobs,
    trajectories,
)

MIXED = (1, 2, 0, 1, 0, 3)
"""Images in each row of the test batch."""


pytestmark = pytest.mark.usefixtures("one_megatron_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return rescaled_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(checkpoint):
    return load_policy(checkpoint)


@pytest.fixture(scope="module")
def rows(checkpoint):
    return trajectories(checkpoint, MIXED)


@pytest.fixture(scope="module")
def oracle(checkpoint, rows):
    return oracle_training(checkpoint, rows)


def build(checkpoint, optimizer=OPTIMIZER, total_steps=STEPS, **trainer) -> MegatronCoreBackend:
    return MegatronCoreBackend(checkpoint, MODEL, optimizer, TrainerConfig(**trainer), total_steps)


@pytest.fixture(scope="module")
def untrained(checkpoint):
    return build(checkpoint)


@torch.no_grad()
def largest_logprob_difference(backend, policy, batch, rows) -> float:
    found = backend_logprobs(backend, batch)
    expected = token_logprobs(oracle_logits(policy, rows), batch)
    assert len(expected) and expected.std() > 0.1
    return float((found - expected).abs().max())


def test_it_is_a_train_backend(untrained):
    assert isinstance(untrained, TrainBackend)
    assert (untrained.data_rank, untrained.data_size) == (0, 1)


def test_logprobs_of_rows_end_to_end_equal_transformers(untrained, policy, rows):
    batch = collate(rows)
    assert largest_logprob_difference(untrained, policy, batch, rows) < 1e-5


def test_logprobs_of_a_batch_without_images_equal_transformers(untrained, policy, checkpoint):
    rows = trajectories(checkpoint, (0, 0, 0))
    batch = collate(rows)
    assert largest_logprob_difference(untrained, policy, batch, rows) < 1e-5


@torch.no_grad()
def test_router_gap_is_the_least_over_the_layers_of_transformers_router(untrained, policy, rows):
    kept = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda m, i, o: kept.append(i[0] @ m.weight.T))
        for layer in policy.model.language_model.layers
    ]
    batch = collate([rows[1]])
    oracle_logits(policy, [rows[1]])
    for hook in hooks:
        hook.remove()
    ordered = torch.stack(kept).sort(-1, descending=True).values
    expected = (ordered[..., 1] - ordered[..., 2]).amin(0)
    backend_logprobs(untrained, batch)
    found = torch.stack([choice.gap for choice in untrained.routing()]).amin(0)
    assert found.dtype == torch.float32 and found.shape == batch.token_ids.shape
    torch.testing.assert_close(found, expected.view(found.shape), atol=1e-5, rtol=0)


def test_weights_come_out_as_they_went_in(untrained, policy):
    expected = dict(policy.named_parameters())
    found = list(whole_weights(untrained.weights()))
    assert Counter(name for name, _ in found) == Counter(list(expected))
    for name, weight in found:
        assert weight.dtype == expected[name].dtype and torch.equal(weight, expected[name]), name


def test_three_steps_equal_adamw_on_transformers(checkpoint, rows, oracle):
    backend = build(checkpoint)
    denominator = sum(row.action_tokens for row in rows)
    norms, weights = backend_training(backend, [(rows, advantages(rows))], denominator)
    np.testing.assert_allclose(norms, oracle[0], rtol=1e-5)
    assert largest_difference(weights, oracle[1], dimensions=2) < 5e-6
    assert largest_difference(weights, oracle[1], dimensions=1) < 5e-6


def test_without_the_wd_mult_handling_norms_are_decayed_and_the_oracle_says_so(
    checkpoint, rows, oracle, monkeypatch
):
    monkeypatch.setattr(
        megatron_core, "group_weight_decay", lambda group, config: group["weight_decay"]
    )
    backend = build(checkpoint)
    denominator = sum(row.action_tokens for row in rows)
    _, weights = backend_training(backend, [(rows, advantages(rows))], denominator)
    assert largest_difference(weights, oracle[1], dimensions=1) > 1e-3
    assert largest_difference(weights, oracle[1], dimensions=2) < 1e-3


def test_gradient_accumulation_does_not_change_the_step(checkpoint, rows, oracle):
    backend = build(checkpoint)
    values = advantages(rows)
    denominator = sum(row.action_tokens for row in rows)
    micro_batches = [(rows[i : i + 2], values[i : i + 2]) for i in range(0, len(rows), 2)]
    micro_batches.append(([filler_row(rows[0])], [np.zeros(0, np.float32)]))
    norms, weights = backend_training(backend, micro_batches, denominator)
    np.testing.assert_allclose(norms, oracle[0], rtol=1e-5)
    assert largest_difference(weights, oracle[1]) < 5e-6


def test_a_step_on_nothing_on_no_number_or_withheld_leaves_no_trace(checkpoint, rows, oracle):
    denominator = sum(row.action_tokens for row in rows)
    norms, weights = disturbed_training(build(checkpoint), [(rows, advantages(rows))], denominator)
    expected = [n for norm in oracle[0] for n in (np.nan, 0.0, 3 * norm, norm)]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    assert largest_difference(weights, oracle[1]) < 5e-6


def test_activation_checkpointing_keeps_less_and_changes_no_step(checkpoint, rows, oracle):
    backend = build(checkpoint, activation_checkpointing=True)
    batch = collate(rows)
    assert kept_bytes(backend, batch) < 0.6 * kept_bytes(build(checkpoint), batch)
    backend = build(checkpoint, activation_checkpointing=True)
    denominator = sum(row.action_tokens for row in rows)
    norms, weights = backend_training(backend, [(rows, advantages(rows))], denominator)
    np.testing.assert_allclose(norms, oracle[0], rtol=1e-5)
    assert largest_difference(weights, oracle[1]) < 5e-6


def in_bfloat16(checkpoint) -> MegatronCoreBackend:
    model = MODEL.model_copy(update={"dtype": "bfloat16"})
    return MegatronCoreBackend(checkpoint, model, OPTIMIZER, TrainerConfig(), STEPS)


def test_bfloat16_is_as_near_to_float32_as_transformers_own(checkpoint, policy, rows):
    """At positions far apart, where rotary frequencies of 8 bits would turn by another angle."""
    batch = collate(rows)
    batch = replace(batch, position_ids=batch.position_ids * 200)

    def oracle_logprobs(model):
        logits = oracle_logits(model, rows, stretch=200)
        return token_logprobs(logits.float().detach(), batch)

    exact = oracle_logprobs(policy)
    theirs = oracle_logprobs(load_policy(checkpoint, "bfloat16"))
    ours = backend_logprobs(in_bfloat16(checkpoint), batch)
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_bfloat16_resumes_exactly_although_its_weights_are_rounded(checkpoint, rows, tmp_path):
    straight, resumed = in_bfloat16(checkpoint), in_bfloat16(checkpoint)
    step = ([(rows, advantages(rows))], sum(row.action_tokens for row in rows))
    backend_step(straight, *step)
    straight.save(tmp_path).result()
    resumed.load(tmp_path)
    assert backend_step(straight, *step) == backend_step(resumed, *step)
    weights = given_out(straight)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert largest_difference(given_out(resumed), weights) == 0


def test_frozen_routers_are_named_left_out_and_saved_all_the_same(checkpoint, rows, tmp_path):
    optimizer = OPTIMIZER.model_copy(update={"freeze_router": True})
    backend = build(checkpoint, optimizer)
    gates = {f"model.language_model.layers.{n}.mlp.gate.weight" for n in (0, 1)}
    assert backend.frozen == gates
    less = given_out(backend, backend.frozen)
    assert given_out(backend).keys() - less.keys() == gates
    step = ([(rows, advantages(rows))], sum(row.action_tokens for row in rows))
    backend_step(backend, *step)
    backend.save(tmp_path).result()
    again = build(checkpoint, optimizer)
    again.load(tmp_path)
    assert backend_step(again, *step) == backend_step(backend, *step)


def test_learning_rate_follows_the_schedule_also_after_a_resume(checkpoint, rows, tmp_path):
    """Warm-up over two steps, then linearly down to 0 at the fifth: worked by hand."""
    optimizer = OptimizerConfig(lr=6e-3, schedule="linear", warmup_steps=2)
    backend = build(checkpoint, optimizer, total_steps=5)
    step = ([(rows, advantages(rows))], sum(row.action_tokens for row in rows))
    rates = []
    for number in range(5):
        if number == 3:
            backend.save(tmp_path).result()
            backend = build(checkpoint, optimizer, total_steps=5)
            backend.load(tmp_path)
        backend_step(backend, *step)
        rates.append([group["lr"] for group in backend.optimizer.param_groups])
    expected = [3e-3, 6e-3, 6e-3, 4e-3, 2e-3]
    np.testing.assert_allclose(rates, np.transpose([expected] * len(rates[0])))


def test_decay_filter_all_decays_norms_too(checkpoint):
    optimizer = OptimizerConfig(weight_decay=0.5, decay_filter="all")
    groups = build(checkpoint, optimizer).optimizer.param_groups
    assert {megatron_core.group_weight_decay(group, optimizer) for group in groups} == {0.5}


def test_a_model_that_the_translation_does_not_cover_is_refused(policy):
    config = copy.deepcopy(policy.config)
    config.text_config.mlp_only_layers = [1]
    with pytest.raises(ValueError, match="mlp_only_layers"):
        check_supported(config)
