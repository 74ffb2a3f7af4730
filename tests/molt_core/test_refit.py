"""Refit of a real engine: tokens match the weights of their version, repeated refits are exact, missing weights are named.

One engine serves all tests of this file, in a process of its own; this process scores its tokens with transformers.
"""

import asyncio
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer

from molt_core.config import EngineConfig, ModelConfig
from molt_core.models.load import (
    eos_token_id,
    excluded_token_ids,
    load_policy,
    save_policy,
)
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.rollout import refit
from molt_core.types import NotFinite
from tests.molt_core.make import weight

LONG, SHORT, REQUESTS = 60, 12, 6
ROUTER = ".mlp.gate.weight"
LIMIT = 2**14
"""Bytes of a bucket: the embedding and the stacked experts come in several, at most a few experts in one."""


@dataclass(frozen=True)
class Sample:
    """One request's answer: new ids, their log-probabilities and versions."""

    ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


async def _play(checkpoint: Path, other: Path, spoilt: Path, prompt: list[int]) -> dict:
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

    async def refit_to(
        folder: Path, version: int, left_out: int = 0, frozen: str = "nothing"
    ) -> None:
        def announce(bucket: dict):
            cut.update(s["name"] for s in bucket["slots"] if s["stop"] - s["start"] < s["shape"][0])
            return asyncio.run_coroutine_threadsafe(engine.receive(bucket), loop).result

        weights = [
            weight(name, parameter.detach())
            for name, parameter in loaded[folder]
            if not name.endswith(frozen)
        ][left_out:]
        names = {n for n in refit.checkpoint_names(folder) if not n.endswith(frozen)}
        await engine.pause()
        await asyncio.to_thread(refit.send, group, weights, announce, names, LIMIT)
        await engine.resume(version)

    async def sample(count: int, seed: int) -> Sample:
        out = await engine.generate(
            prompt, (), temperature=1.0, max_new_tokens=count, seed=seed, stop_at_eos=False
        )
        return Sample(out.token_ids, out.logprobs, out.versions)

    cut: set[str] = set()
    # Before the requests, which would come to their end meanwhile.
    loaded = {f: sorted(load_policy(f).named_parameters()) for f in (other, spoilt)}
    long = [asyncio.create_task(sample(LONG, seed)) for seed in range(REQUESTS)]
    await sample(SHORT, 99)  # the long ones are about as far now
    await refit_to(other, 1)
    results = {"in flight": await asyncio.gather(*long)}
    for version in (2, 3):
        await refit_to(other, version)
    results["after three"] = [await sample(SHORT, seed) for seed in range(REQUESTS)]
    await refit_to(other, 4, frozen=ROUTER)
    results["without routers"] = [await sample(SHORT, seed) for seed in range(REQUESTS)]
    await refit_to(spoilt, 5)
    try:
        await sample(SHORT, 0)
    except NotFinite as error:
        results["no number"] = error
    try:
        await refit_to(other, 6, left_out=1)
    except refit.RefitError as error:
        results["refusal"] = str(error)
    engine.shutdown()
    return {**results, "cut": cut}


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
    with torch.no_grad():  # finite, as a far too long step leaves them; their product is not
        model.lm_head.weight.mul_(1e20)
        model.model.language_model.norm.weight.mul_(1e20)
    save_policy(model, folder / "first", folder / "spoilt")
    tokenizer = AutoTokenizer.from_pretrained(folder / "first")
    prompt = tokenizer("what color is the square?").input_ids
    excluded = list(excluded_token_ids(folder / "first"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        folders = [folder / name for name in ("first", "second", "spoilt")]
        results = pool.submit(_in_own_process, *folders, prompt).result()
    policies = {0: load_policy(folder / "first"), 1: load_policy(folder / "second")}
    return results, partial(_score, policies, prompt, excluded)


@torch.no_grad()
def _score(policies, prompt: list[int], excluded: list[int], sample: Sample, version: int):
    ids = torch.tensor([prompt + sample.ids.tolist()])
    logits = policies[min(version, 1)](input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logits[:, excluded] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.engine
def test_tokens_of_a_request_in_flight_match_the_weights_of_their_version(played):
    results, score = played
    both = [s for s in results["in flight"] if {0, 1} <= set(s.versions.tolist())]
    assert len(both) == REQUESTS, "the refit came before or after the requests, not during them"
    for sample in both:
        expected = np.where(sample.versions == 0, score(sample, 0), score(sample, 1))
        np.testing.assert_allclose(sample.logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.engine
def test_the_two_policies_are_told_apart_by_the_test_above(played):
    results, score = played
    for sample in results["in flight"]:
        assert np.abs(score(sample, 0) - score(sample, 1)).max() > 0.1


@pytest.mark.engine
def test_refits_of_the_same_weights_leave_the_policy_as_it_is(played):
    results, score = played
    for sample in results["after three"]:
        assert set(sample.versions.tolist()) == {3}
        np.testing.assert_allclose(sample.logprobs, score(sample, 3), rtol=0, atol=1e-5)


@pytest.mark.engine
def test_a_refit_without_the_frozen_weights_leaves_them_as_they_are(played):
    results, score = played
    for sample in results["without routers"]:
        assert set(sample.versions.tolist()) == {4}
        np.testing.assert_allclose(sample.logprobs, score(sample, 4), rtol=0, atol=1e-5)


@pytest.mark.engine
def test_the_weights_of_the_tests_above_came_in_slices(played):
    results, _ = played
    endings = {name.rsplit(".", 2)[-1 if "proj" in name else -2] for name in results["cut"]}
    assert endings >= {"embed_tokens", "lm_head", "gate_up_proj", "down_proj"}


@pytest.mark.engine
def test_weights_whose_log_probabilities_are_no_numbers_are_told_by_their_version(played):
    error = played[0]["no number"]
    assert error.version == 5 and "log-probability nan, version 5" in str(error)


@pytest.mark.engine
def test_a_refit_that_lacks_a_tensor_names_it(played):
    results, _ = played
    assert "missing ['lm_head.weight']" in results["refusal"]


@pytest.mark.parametrize("row", [2, 4, 2**13])
def test_a_checksum_is_the_words_times_the_odd_numbers_modulo_2_to_the_64(monkeypatch, row):
    monkeypatch.setattr(refit, "CHECKSUM_ROW", row)
    words = [3, -(2**63), 2**62, -1, 2**63 - 1, 12345, 7]
    expected = sum((2 * place + 1) * word for place, word in enumerate(words)) % 2**64
    buffer = torch.tensor(words).view(torch.uint8)
    assert refit.checksum(buffer) % 2**64 == expected
    for byte in range(len(buffer)):
        changed = buffer.clone()
        changed[byte] ^= 128
        assert refit.checksum(changed) % 2**64 != expected
    exchanged = torch.tensor([words[1], words[0], *words[2:]]).view(torch.uint8)
    assert refit.checksum(exchanged) % 2**64 != expected


@pytest.mark.parametrize(
    "tied, expected", [(True, {"embed"}), (False, {"embed", "lm_head.weight"})]
)
def test_a_tied_output_layer_is_expected_once(tmp_path, tied, expected):
    save_file(
        {"embed": torch.zeros(2), "lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    assert refit.checkpoint_names(tmp_path) == expected
