"""A policy of text alone whose files hold one tensor an expert (Qwen3-MoE): read, trained, sent, saved and exported.

One engine, in a process of its own, samples from a trained export and, after a refit, from the initial weights.
"""

import asyncio
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from molt_core.config import CheckpointConfig, EngineConfig, ModelConfig, TrainerConfig
from molt_core.export import export
from molt_core.models.load import (
    content_hash,
    eos_token_id,
    excluded_token_ids,
    iterate_weights,
    load_policy,
    save_policy,
)
from molt_core.models.tiny import build_tiny_qwen3_moe
from molt_core.rollout import refit
from molt_core.rollout.engine import Sampled
from molt_core.train.checkpoint import CheckpointStore
from molt_core.train.collate import collate
from molt_core.train.fsdp2 import FSDP2Backend
from molt_core.types import ImageInput
from tests.harness.trainer_cases import (
    OPTIMIZER,
    STEPS,
    advantages,
    backend_logprobs,
    backend_training,
    largest_difference,
    oracle_logits,
    oracle_training,
    rescaled_checkpoint,
    token_logprobs,
    trajectories,
    with_random_records,
)
from tests.molt_core.make import weight
from tests.molt_core.test_loop import run_config, run_loop

MODEL = ModelConfig(builtin="tiny-qwen3-moe")
PROMPT, NEW = [5, 17, 42, 99, 3], 12
EXPERTS = 8
LIMIT = 2**14
"""Bytes of a bucket of a refit: the stacked experts come in several."""
PARITY = "tests.molt_core.test_loop:ParityAgent"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return rescaled_checkpoint(tmp_path_factory.mktemp("text"), build_tiny_qwen3_moe)


@pytest.fixture(scope="module")
def rows(checkpoint):
    return trajectories(checkpoint, (0, 0, 0, 0))


@pytest.fixture(scope="module")
def trained(checkpoint, rows, one_rank, tmp_path_factory):
    """(gradient norms, the trainer's weights, their export) after some steps, by way of a checkpoint."""
    folder = tmp_path_factory.mktemp("export")
    backend = FSDP2Backend(checkpoint, MODEL, OPTIMIZER, TrainerConfig(), STEPS)
    count = sum(row.action_tokens for row in rows)
    norms, weights = backend_training(backend, [(rows, advantages(rows))], count)
    store = CheckpointStore(folder / "run" / "checkpoints", CheckpointConfig())
    draft = store.draft(STEPS)
    backend.save(draft / "trainer").result()
    export(store.commit(draft, b"", {"step": STEPS}, checkpoint).path, folder / "out")
    return norms, weights, folder / "out"


def test_its_files_hold_one_tensor_an_expert_and_projection(checkpoint):
    names = {name for name, _ in iterate_weights(checkpoint)}
    assert {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        for layer in (0, 1)
        for expert in range(EXPERTS)
        for projection in ("gate", "up", "down")
    } == {name for name in names if ".experts." in name}


def test_transformers_writes_the_same_files(checkpoint, tmp_path):
    """Its own conversion of a model made in memory, as the right value for ours."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    model.save_pretrained(tmp_path / "theirs")
    ours = save_policy(model, checkpoint, tmp_path / "ours")
    assert content_hash(tmp_path / "theirs") == content_hash(ours)


@pytest.mark.parametrize("recorded", [False, True], ids=["by its router", "by the record"])
def test_logprobs_of_rows_end_to_end_equal_transformers(checkpoint, rows, one_rank, recorded):
    taken = with_random_records(rows) if recorded else rows
    model = MODEL.model_copy(update={"routing_replay": recorded})
    batch = collate(taken)
    backend = FSDP2Backend(checkpoint, model, OPTIMIZER, TrainerConfig(), STEPS)
    with torch.no_grad():
        expected = token_logprobs(oracle_logits(load_policy(checkpoint), taken), batch)
    assert expected.std() > 0.1
    assert float((backend_logprobs(backend, batch) - expected).abs().max()) < 1e-5


def test_its_steps_are_those_of_transformers_and_adamw(checkpoint, rows, trained):
    norms, weights, _ = trained
    oracle = oracle_training(checkpoint, rows)
    assert norms == pytest.approx(oracle.norms, rel=1e-5)
    assert largest_difference(weights, oracle.weights) < 5e-6


def test_transformers_loads_the_trained_weights(trained):
    _, weights, out = trained
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert largest_difference(dict(loaded.named_parameters()), weights) == 0


def test_an_export_has_the_dtypes_of_the_policy_that_the_run_began_from(checkpoint, tmp_path):
    half = save_policy(load_policy(checkpoint, "bfloat16"), checkpoint, tmp_path / "half")
    dtypes = dict.fromkeys((name for name, _ in iterate_weights(half)), torch.bfloat16)
    again = save_policy(load_policy(half), half, tmp_path / "again", dtypes)
    assert content_hash(again) == content_hash(half)


def test_an_image_is_refused_with_what_to_do(checkpoint, rows, one_rank):
    backend = FSDP2Backend(checkpoint, MODEL, OPTIMIZER, TrainerConfig(), STEPS)
    patches = np.zeros((4, 384), np.float32)
    image = ImageInput(np.zeros((16, 16, 3), np.uint8), patches, (1, 2, 2), start=0, length=1)
    row = replace(rows[0], images=(image,))
    with pytest.raises(ValueError, match="1 images for a model that reads text alone; take"):
        backend_logprobs(backend, collate([row]))


async def _play(folder: Path, other: Path) -> tuple[Sampled, Sampled]:
    """A sample of the weights in ``folder`` and, after two refits, one of those in ``other``."""
    from molt_core.rollout.engine import Engine

    model = ModelConfig(path=str(folder), max_length=len(PROMPT) + NEW, routing_replay=True)
    excluded, eos = excluded_token_ids(folder), eos_token_id(folder)
    engine = Engine(folder, model, EngineConfig(), excluded, eos)
    await engine.start()
    loop = asyncio.get_running_loop()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    info = {"host": "127.0.0.1", "port": store.port, "first_rank": 1, "size": 2, "timeout_s": 60.0}
    joining = asyncio.to_thread(refit.join_group, store, 0, 2, torch.device("cpu"), 60.0)
    group, _ = await asyncio.gather(joining, engine.join(info))

    def announce(bucket: dict):
        return asyncio.run_coroutine_threadsafe(engine.receive(bucket), loop).result

    async def sample() -> Sampled:
        return await engine.generate(
            PROMPT, (), temperature=1.0, max_new_tokens=NEW, seed=1, stop_at_eos=False
        )

    before = await sample()
    for version in (1, 2):
        await engine.pause()
        names = refit.checkpoint_names(other)
        policy = load_policy(other)
        weights = [weight(name, tensor.detach()) for name, tensor in policy.named_parameters()]
        await asyncio.to_thread(refit.send, group, weights, announce, names, LIMIT)
        await engine.resume(version)
    after = await sample()
    engine.shutdown()
    return before, after


def _in_own_process(*arguments) -> tuple[Sampled, Sampled]:
    from molt_core.rollout.engine import prepare_environment

    prepare_environment(EngineConfig())
    return asyncio.run(_play(*arguments))


@pytest.fixture(scope="module")
def sampled(trained, checkpoint) -> dict[str, tuple[Sampled, Path]]:
    """By when it was sampled: a sample and the folder of its weights."""
    out = trained[2]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        before, after = pool.submit(_in_own_process, out, checkpoint).result()
    return {"export": (before, out), "refit": (after, checkpoint)}


@torch.no_grad()
def transformers_says(folder: Path, sample: Sampled) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities ``[n]`` of the new tokens; experts ``[T - 1, layers, k]`` of all tokens but the last, sorted."""
    ids = torch.tensor([PROMPT + sample.token_ids.tolist()])
    policy, routes = load_policy(folder), []
    for layer in policy.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, out: routes.append(out[2]))
    logits = policy(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    logits[:, list(excluded_token_ids(folder))] = -torch.inf
    logprobs = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return logprobs.numpy(), torch.stack(routes, 1).sort(-1).values.numpy()[:-1]


@pytest.mark.engine
@pytest.mark.parametrize("when", ["export", "refit"])
def test_vllm_samples_and_routes_as_transformers_does(sampled, when):
    sample, folder = sampled[when]
    logprobs, experts = transformers_says(folder, sample)
    np.testing.assert_allclose(sample.logprobs, logprobs, rtol=0, atol=1e-5)
    assert np.array_equal(np.sort(sample.routed_experts, -1), experts)


@pytest.mark.engine
def test_the_two_weights_are_told_apart_by_the_test_above(sampled):
    (before, _), (after, folder) = sampled["export"], sampled["refit"]
    assert set(before.versions.tolist()) == {0} and set(after.versions.tolist()) == {2}
    assert float(np.abs(transformers_says(folder, before)[0] - before.logprobs).max()) > 1e-3


@pytest.mark.engine
def test_a_run_trains_it_on_text_and_every_probe_agrees(ray_session, tmp_path):
    """Without staleness, so that the routes replayed are those of the policy that is stepped."""
    policy = build_tiny_qwen3_moe(tmp_path / "policy")
    lines = [{"prompt": f"what color is {n}?", "answer": "red"} for n in range(32)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = run_config(
        model={"builtin": "tiny-qwen3-moe", "max_length": 96, "routing_replay": True},
        task={"source": str(data), "agent": PARITY, "eval_items": 8},
        loop={"steps": 2, "max_staleness": 0},
    )
    records = run_loop(config, policy, tmp_path / "run")
    sent = sum(weight.nbytes for _, weight in iterate_weights(policy))
    for record in records[1:]:
        assert record["grad_norm"] > 0 and record["update_ratio"] > 1e-3
        assert record["mismatch_p99"] <= 1e-5
        assert max(record["router_disagreement"].values()) < 0.002
        assert record["refit_bytes"] == sent
    names = [name for name, _ in iterate_weights(policy)]
    assert [n for n, _ in iterate_weights(tmp_path / "run" / "checkpoints" / "policy")] == names
