"""Refit of a real engine: tokens match the weights of their version, repeated refits are exact, missing weights are named.

One engine serves all tests of this file, in a process of its own; this process scores its tokens with transformers.
"""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from molt_core.config import EngineConfig, ModelConfig
from molt_core.models.load import (
    eos_token_id,
    excluded_token_ids,
    iterate_weights,
    load_policy,
    save_policy,
)
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.rollout import refit

LONG, SHORT, REQUESTS = 60, 12, 6
pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Sample:
    """One request's answer: new ids, their log-probabilities and versions."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


async def _play(checkpoint: Path, other: Path, prompt: list[int]) -> dict:
    from molt_core.rollout.engine import Engine

    model = ModelConfig(path=str(checkpoint), max_length=len(prompt) + LONG)
    excluded, eos = excluded_token_ids(checkpoint), eos_token_id(checkpoint)
    engine = Engine(checkpoint, model, EngineConfig(), excluded, eos)
    await engine.start()
    loop = asyncio.get_running_loop()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    info = {"host": "127.0.0.1", "port": store.port, "first_rank": 1, "size": 2, "timeout_s": 60.0}
    joining = asyncio.to_thread(refit.join_group, store, 0, 2, torch.device("cpu"), 60.0)
    group, _ = await asyncio.gather(joining, engine.join(info))

    async def refit_to(folder: Path, version: int, left_out: int = 0) -> None:
        def announce(bucket: dict):
            return asyncio.run_coroutine_threadsafe(engine.receive(bucket), loop).result

        weights = sorted(iterate_weights(folder))[left_out:]
        names = refit.checkpoint_names(folder)
        await engine.pause()
        await asyncio.to_thread(refit.send, group, weights, announce, names)
        await engine.resume(version)

    async def sample(count: int, seed: int) -> Sample:
        out = await engine.generate(
            prompt, (), temperature=1.0, max_new_tokens=count, seed=seed, stop_at_eos=False
        )
        return Sample(out.token_ids, out.logprobs, out.versions)

    long = [asyncio.create_task(sample(LONG, seed)) for seed in range(REQUESTS)]
    await sample(SHORT, 99)  # the long ones are about as far now
    await refit_to(other, 1)
    results = {"in flight": await asyncio.gather(*long)}
    for version in (2, 3):
        await refit_to(other, version)
    results["after three"] = [await sample(SHORT, seed) for seed in range(REQUESTS)]
    try:
        await refit_to(other, 4, left_out=1)
    except refit.RefitError as error:
        results["refusal"] = str(error)
    engine.shutdown()
    return results


def _in_own_process(*arguments) -> dict:
    from molt_core.rollout.engine import prepare_environment

    prepare_environment(EngineConfig())
    return asyncio.run(_play(*arguments))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(results of ``_play``, function that scores a sample under version 0 or under the later weights)."""
    folder = tmp_path_factory.mktemp("refit")
    build_tiny_qwen3_vl_moe(folder / "first")
    model = load_policy(folder / "first")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    save_policy(model, folder / "first", folder / "second")
    tokenizer = AutoTokenizer.from_pretrained(folder / "first")
    prompt = tokenizer("what color is the square?").input_ids
    excluded = list(excluded_token_ids(folder / "first"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        arguments = (folder / "first", folder / "second", prompt)
        results = pool.submit(_in_own_process, *arguments).result()
    policies = {0: load_policy(folder / "first"), 1: load_policy(folder / "second")}
    return results, partial(_score, policies, prompt, excluded)


@torch.no_grad()
def _score(policies, prompt: list[int], excluded: list[int], sample: Sample, version: int):
    ids = torch.tensor([prompt + sample.ids.tolist()])
    logits = policies[min(version, 1)](input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logits[:, excluded] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_tokens_of_a_request_in_flight_match_the_weights_of_their_version(played):
    results, score = played
    both = [s for s in results["in flight"] if {0, 1} <= set(s.versions.tolist())]
    assert len(both) == REQUESTS, "the refit came before or after the requests, not during them"
    for sample in both:
        expected = np.where(sample.versions == 0, score(sample, 0), score(sample, 1))
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=1e-5)


def test_the_two_policies_are_told_apart_by_the_test_above(played):
    results, score = played
    for sample in results["in flight"]:
        assert np.abs(score(sample, 0) - score(sample, 1)).max() > 0.1


def test_refits_of_the_same_weights_leave_the_policy_as_it_is(played):
    results, score = played
    for sample in results["after three"]:
        assert set(sample.versions.tolist()) == {3}
        np.testing.assert_allclose(sample.logprobs, score(sample, 3), rtol=0, atol=1e-5)


def test_a_refit_that_lacks_a_tensor_names_it(played):
    results, _ = played
    assert "missing ['lm_head.weight']" in results["refusal"]
