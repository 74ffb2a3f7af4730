"""Routing replay in both trainers, against transformers' own routers; the record is one that transformers itself gave."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.baselines.megatron_core import MegatronCoreBackend
from molt_core.config import TrainerConfig
from molt_core.models.load import load_policy, save_policy
from molt_core.train.collate import collate
from molt_core.train.fsdp2 import FSDP2Backend
from molt_core.types import Trajectory, Turn
from tests.harness.trainer_cases import (
    MODEL,
    OPTIMIZER,
    STEPS,
    advantages,
    backend_logprobs,
    backend_training,
    given_out,
    largest_difference,
    oracle_logits,
    oracle_training,
    rescaled_checkpoint,
    token_logprobs,
    trajectories,
    with_random_records,
)

IMAGES = (1, 2, 0, 1, 0, 0)
both = pytest.mark.parametrize("backend_class", [FSDP2Backend, MegatronCoreBackend])


pytestmark = pytest.mark.usefixtures("one_megatron_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return rescaled_checkpoint(tmp_path_factory.mktemp("policy"))


def two_turns(row: Trajectory) -> Trajectory:
    """``row`` with its second action token taken for an observation between two turns."""
    first, stop = row.turns[0].start, row.turns[0].stop
    mask = row.action_mask.copy()
    mask[first + 1] = False
    return replace(
        row,
        action_mask=mask,
        logprobs=np.where(mask, row.logprobs, 0).astype(np.float32),
        versions=np.where(mask, 0, -1),
        turns=(Turn(first, first + 1, {}, 0, "stop"), Turn(first + 2, stop, {}, 1, "stop")),
    )


@pytest.fixture(scope="module")
def rows(checkpoint):
    rows = trajectories(checkpoint, IMAGES)
    return [two_turns(rows[0]), *rows[1:]]


@torch.no_grad()
def captured(policy, rows: list[Trajectory]) -> list[Trajectory]:
    """The rows with what transformers chose for each alone, as an engine records: the last token was never an input."""
    recorded = []
    for row in rows:
        layers = []

        def keep(module, inputs, outputs, layers=layers):
            layers.append(outputs[2].numpy())

        hooks = [
            layer.mlp.gate.register_forward_hook(keep)
            for layer in policy.model.language_model.layers
        ]
        oracle_logits(policy, [row])
        for hook in hooks:
            hook.remove()
        record = np.stack(layers, 1).astype(np.int16)
        record[-1] = -1
        recorded.append(replace(row, routed_experts=record))
    return recorded


def build(backend_class, checkpoint, replay=True, optimizer=OPTIMIZER, **trainer):
    model = MODEL.model_copy(update={"routing_replay": replay})
    return backend_class(checkpoint, model, optimizer, TrainerConfig(**trainer), STEPS)


@both
def test_replaying_the_own_choices_changes_nothing(backend_class, checkpoint, rows):
    batch = collate(captured(load_policy(checkpoint), rows))
    found = backend_logprobs(build(backend_class, checkpoint), batch)
    natural = backend_logprobs(build(backend_class, checkpoint, replay=False), batch)
    assert float((found - natural).abs().max()) < 1e-6


@both
def test_other_weights_still_choose_what_was_recorded_and_route_the_rest(
    backend_class, checkpoint, rows, tmp_path
):
    recorded = captured(load_policy(checkpoint), rows)
    policy = load_policy(checkpoint)
    with torch.no_grad():
        for layer in policy.model.language_model.layers:
            layer.mlp.gate.weight.mul_(-1)
    moved = save_policy(policy, checkpoint, tmp_path / "moved")
    backend, batch = build(backend_class, moved), collate(recorded)
    backend_logprobs(backend, batch)
    for layer, choice in enumerate(backend.routing()):
        record = batch.routed_experts[:, layer]
        has_record = (record >= 0).all(-1)
        assert 0 < (~has_record).sum() == len(rows)
        assert torch.equal(choice.chosen[has_record], record[has_record])
        assert torch.equal(choice.chosen[~has_record], choice.natural[~has_record])
        assert (choice.natural[has_record] != record[has_record]).any(-1).float().mean() > 0.9


@both
def test_another_record_is_another_policy_and_equals_transformers_with_it(
    backend_class, checkpoint, rows
):
    policy, recorded = load_policy(checkpoint), with_random_records(rows)
    batch = collate(recorded)
    found = backend_logprobs(build(backend_class, checkpoint), batch)
    with torch.no_grad():
        expected = token_logprobs(oracle_logits(policy, recorded), batch)
        natural = token_logprobs(oracle_logits(policy, rows), batch)
    assert float((found - expected).abs().max()) < 1e-5
    assert float((natural - expected).abs().max()) > 0.1


@both
@pytest.mark.parametrize("recompute", [False, True])
def test_the_router_learns_under_replay_as_transformers_does(
    backend_class, checkpoint, rows, recompute
):
    recorded = with_random_records(rows)
    oracle = oracle_training(checkpoint, recorded)
    backend = build(backend_class, checkpoint, activation_checkpointing=recompute)
    values, denominator = advantages(rows), sum(row.action_tokens for row in rows)
    halves = [(recorded[:3], values[:3]), (recorded[3:], values[3:])]
    norms, weights = backend_training(backend, halves, denominator)
    assert norms == pytest.approx(oracle.norms, rel=1e-5)
    assert largest_difference(weights, oracle.weights) < 5e-6
    initial = dict(load_policy(checkpoint).named_parameters())
    router = "model.language_model.layers.0.mlp.gate.weight"
    assert float((weights[router] - initial[router]).detach().abs().max()) > 1e-3


@both
def test_a_frozen_router_stays_the_rest_moves_and_both_are_saved(
    backend_class, checkpoint, rows, tmp_path
):
    optimizer = OPTIMIZER.model_copy(update={"freeze_router": True})
    backend = build(backend_class, checkpoint, replay=False, optimizer=optimizer)
    denominator = sum(row.action_tokens for row in rows)
    _, weights = backend_training(backend, [(rows, advantages(rows))], denominator)
    initial = dict(load_policy(checkpoint).named_parameters())
    moved = {name for name in initial if not torch.equal(weights[name], initial[name])}
    for layer in (f"model.language_model.layers.{number}.mlp" for number in range(2)):
        assert f"{layer}.experts.down_proj" in moved
        assert f"{layer}.gate.weight" not in moved
    backend.save(tmp_path / "state").result()
    again = build(backend_class, checkpoint, replay=False, optimizer=optimizer)
    again.load(tmp_path / "state")
    assert largest_difference(given_out(again), weights) == 0


@both
def test_a_row_without_a_record_routes_as_usual_however_the_batch_is_cut(
    backend_class, checkpoint, rows
):
    pair = [with_random_records(rows)[0], rows[1]]
    backend = build(backend_class, checkpoint)
    together = backend_logprobs(backend, collate(pair))
    alone = [backend_logprobs(backend, collate([row])) for row in pair]
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=1e-5)
    natural = backend_logprobs(build(backend_class, checkpoint, replay=False), collate(rows[1:2]))
    torch.testing.assert_close(alone[1], natural, rtol=0, atol=1e-5)


@both
def test_replay_of_another_models_record_is_refused(backend_class, checkpoint, rows):
    backend = build(backend_class, checkpoint)
    other = replace(rows[0], routed_experts=np.zeros((len(rows[0].token_ids), 3, 2), np.int16))
    with pytest.raises(ValueError, match="records 3 layers, the model has 2 routers"):
        backend_logprobs(backend, collate([other]))
