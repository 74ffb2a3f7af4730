"""A policy whose output layer is its embedding: trained as one weight, saved and sent once, and still tied at the other end."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from molt_core.config import TrainerConfig
from molt_core.models.load import iterate_weights, load_policy, save_policy
from molt_core.rollout.refit import OUTPUT_LAYER, checkpoint_names
from molt_core.train.collate import collate
from molt_core.train.fsdp2 import FSDP2Backend
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
    token_logprobs,
    trajectories,
)
from tests.molt_core.test_loop import run_config, run_loop

EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(tiny_checkpoint, tmp_path_factory):
    """The tiny policy, tied, its routers as they were; on disk as published models are: the embedding and no output layer."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("tied") / "policy"
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    policy = AutoModelForImageTextToText.from_config(config)
    own, untied = dict(policy.named_parameters()), load_policy(tiny_checkpoint)
    assert OUTPUT_LAYER not in own
    with torch.no_grad():
        for name, parameter in untied.named_parameters():
            if name in own:
                own[name].copy_(parameter)
    save_policy(policy.named_parameters(), tiny_checkpoint, folder)
    config.save_pretrained(folder)
    return folder


def names_on_disk(folder) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return sorted(file.keys())


def test_it_trains_as_transformers_does_and_goes_on_from_a_save(tied, one_rank, tmp_path):
    rows = trajectories(tied, (1, 0, 2))
    batch = collate(rows, advantages(rows))

    def backend() -> FSDP2Backend:
        return FSDP2Backend(tied, MODEL, OPTIMIZER, TrainerConfig(), STEPS)

    trained = backend()
    with torch.no_grad():
        expected = token_logprobs(oracle_logits(load_policy(tied), rows), batch)
    assert float((backend_logprobs(trained, batch) - expected).abs().max()) < 1e-5

    oracle, share = oracle_training(tied, rows), [(rows, advantages(rows))]
    norms, weights = backend_training(trained, share, len(batch.action_ids))
    assert norms == pytest.approx(oracle.norms, rel=1e-5)
    assert OUTPUT_LAYER not in weights
    assert largest_difference(weights, oracle.weights) < 5e-6

    trained.save(tmp_path / "state").result()
    again = backend()
    again.load(tmp_path / "state")
    assert largest_difference(given_out(again), weights) == 0
    assert torch.equal(backend_logprobs(again, batch), backend_logprobs(trained, batch))

    exported = save_policy(given_out(trained).items(), tied, tmp_path / "export")
    assert OUTPUT_LAYER not in names_on_disk(exported)
    policy = load_policy(exported)
    assert policy.lm_head.weight is policy.model.language_model.embed_tokens.weight
    assert torch.equal(policy.lm_head.weight, weights[EMBEDDING])


@pytest.mark.engine
def test_a_run_sends_the_shared_weight_once_and_the_engine_uses_it_twice(
    tied, ray_session, tmp_path
):
    assert OUTPUT_LAYER not in checkpoint_names(tied)
    records = run_loop(run_config(loop={"steps": 2, "max_staleness": 0}), tied, tmp_path)
    once = sum(weight.nbytes for _, weight in iterate_weights(tied))
    for record in records[1:]:
        assert record["refit_bytes"] == once
        # An engine that left its output layer as it was would be off by far more after a step of AdamW.
        assert record["mismatch_p99"] <= 1e-5
        assert record["grad_norm"] > 0
    exported = tmp_path / "checkpoints" / "policy"
    assert names_on_disk(exported) == names_on_disk(tied)
    before, after = (dict(iterate_weights(folder))[EMBEDDING] for folder in (tied, exported))
    assert float(np.abs(after - before).max()) > 1e-3
