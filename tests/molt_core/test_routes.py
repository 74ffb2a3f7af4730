"""A real engine records its routes: they are transformers' own choices, whatever vLLM did to a request on its way.

One engine, in a process of its own, plays the ways of a request; one short run replays what its engine records.
"""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from molt_core.agents.base import Result
from molt_core.config import EngineConfig, ModelConfig
from molt_core.models.load import (
    eos_token_id,
    excluded_token_ids,
    expert_layers,
    load_policy,
    save_policy,
)
from molt_core.rollout.engine import Sampled
from tests.molt_core.test_loop import run_config, run_loop

BLOCK = 128
"""Tokens of a KV block of vLLM on the CPU."""
BLOCKS, PROMPT, NEW = 9, BLOCK + 20, 120
"""Three requests fit into the cache while they have fewer than 256 tokens, not when they have more."""
CROWD = 4


async def _play(checkpoint: Path, prompt: list[int]) -> dict[str, list[Sampled]]:
    from molt_core.rollout.engine import Engine

    model = ModelConfig(path=str(checkpoint), max_length=PROMPT + NEW, routing_replay=True)
    config = EngineConfig(kv_cache_blocks=BLOCKS)
    excluded, eos = excluded_token_ids(checkpoint), eos_token_id(checkpoint)
    engine = Engine(checkpoint, model, config, excluded, eos)
    await engine.start()

    async def sample(ids: list[int], count: int, seed: int) -> Sampled:
        return await engine.generate(
            ids, (), temperature=1.0, max_new_tokens=count, seed=seed, stop_at_eos=False
        )

    first = await sample(prompt, 20, 0)
    whole = [*prompt, *first.token_ids.tolist(), *prompt[:5]]
    ways = {
        "alone": [first],
        "prompt in the cache": [await sample(prompt, 20, 1)],
        "a second turn": [await sample(whole, 20, 2)],
        "crowded out": await asyncio.gather(
            *(sample([n, *prompt[1:]], NEW, 3 + n) for n in range(CROWD))
        ),
    }
    running = [asyncio.create_task(sample(prompt, 60, 9 + n)) for n in range(2)]
    await sample(prompt, 10, 8)  # the others are about as far now
    await engine._llm.pause_generation(mode="keep", clear_cache=True)
    await engine._llm.resume_generation()
    ways["computed anew after a pause"] = await asyncio.gather(*running)
    engine.shutdown()
    return ways


def _in_own_process(*arguments) -> dict[str, list[Sampled]]:
    from molt_core.rollout.engine import prepare_environment

    prepare_environment(EngineConfig())
    return asyncio.run(_play(*arguments))


WAYS = (
    "alone",
    "prompt in the cache",
    "a second turn",
    "crowded out",
    "computed anew after a pause",
)


@pytest.fixture(scope="module")
def mixed_policy(tiny_checkpoint, tmp_path_factory) -> Path:
    """The tiny policy whose first layer is dense, so that a layer's number is not its place in a record."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp("mixed")
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    config.text_config.mlp_only_layers = [0]
    torch.manual_seed(0)
    policy = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        policy.model.language_model.layers[1].mlp.gate.weight.normal_(0, 0.5)
    save_policy(policy, tiny_checkpoint, folder)
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def played(mixed_policy):
    """(samples by way, prompt of the first token's place free to vary, transformers' choices for given ids)."""
    words = AutoTokenizer.from_pretrained(mixed_policy)("what color is the square? ").input_ids
    prompt = (words * PROMPT)[:PROMPT]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_in_own_process, mixed_policy, prompt).result()


@torch.no_grad()
def choices(policy, ids: list[int]) -> np.ndarray:
    """``[T, layers, k]`` of transformers' routers, experts sorted."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, out: found.append(out[2]))
        for layer in policy.model.language_model.layers
        if hasattr(layer.mlp, "gate")
    ]
    policy(input_ids=torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


@pytest.mark.engine
@pytest.mark.parametrize("way", WAYS)
def test_the_recorded_routes_are_those_of_every_computed_token(played, mixed_policy, way):
    policy = load_policy(mixed_policy)
    assert expert_layers(mixed_policy) == (1,)
    for sample in played[way]:
        ids = [*sample.prompt_token_ids, *sample.token_ids.tolist()]
        expected = choices(policy, ids)[:-1]
        assert sample.routed_experts.shape == expected.shape
        wrong = (np.sort(sample.routed_experts, -1) != expected).any(-1).any(-1)
        assert wrong.mean() < 0.005, np.flatnonzero(wrong)  # a tie may fall either way
        shifted = (np.sort(sample.routed_experts[1:], -1) != expected[:-1]).any(-1).any(-1)
        assert shifted.mean() > 0.3, "a record one token off would look alike"


class TwoTurns:
    """Speaks twice, with two tokens of the prompt between; an even sum of ids is right."""

    def __init__(self, task) -> None: ...

    async def run(self, context) -> Result:
        ids = list(context.prompt.token_ids)
        first = await context.generate(ids, context.prompt.images)
        ids += [*first.token_ids, *ids[:2]]
        second = await context.generate(ids, context.prompt.images)
        return Result(float(sum(second.token_ids) % 2 == 0))


@pytest.mark.engine
def test_a_run_replays_what_its_engine_recorded(ray_session, tiny_checkpoint, tmp_path):
    """Without staleness the policy that is stepped has the engine's weights, so its own choices are the recorded ones."""
    config = run_config(
        model={"builtin": "tiny-qwen3-vl-moe", "max_length": 128, "routing_replay": True},
        task={
            "source": "shapes",
            "agent": "tests.molt_core.test_routes:TwoTurns",
            "eval_items": 8,
        },
        loop={"steps": 3, "max_staleness": 0},
        trainer={"micro_batch_rows": 5},
    )
    records = run_loop(config, tiny_checkpoint, tmp_path)
    for record in records[1:]:
        assert record["router_disagreement"].keys() == {"0", "1"}
        assert max(record["router_disagreement"].values()) < 0.002
        assert record["grad_norm"] > 0
        assert record["mismatch_p99"] <= 1e-5
