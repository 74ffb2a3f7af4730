"""What a probe and an evaluation sample, without vLLM: how many tokens, of which prompts, from which draw."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from molt_core.agents.base import Result
from molt_core.config import RunConfig
from molt_core.rollout.engine import Sampled
from molt_core.rollout.worker import RolloutWorker, WorkerGroup
from molt_core.types import ContractError, Prompt, Trajectory
from tests.molt_core.test_episode import worker_with

ITEMS, LENGTH, TOKENS = 20, 16, 64


class Engine:
    """As vLLM: what is sampled is a function of prompt, seed and weights."""

    def __init__(self, version: int) -> None:
        self.version, self.tokens = version, Counter()

    async def generate(self, prompt_ids, images, *, seed, max_new_tokens, **options) -> Sampled:
        ids = np.random.default_rng([seed, *prompt_ids]).integers(0, 2**31, max_new_tokens)
        versions = np.full(max_new_tokens, self.version, np.int32)
        logprobs = np.full(max_new_tokens, -1.0, np.float32)
        return Sampled(ids.astype(np.int32), logprobs, versions, "length", list(prompt_ids))


def config(engines: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"builtin": "tiny-qwen3-vl-moe", "max_length": 64},
            "task": {"source": "shapes", "eval_items": ITEMS},
            "engine": {"count": engines},
            "rollout": {"sampling": {"max_new_tokens": 32}},
            "probe": {"tokens": TOKENS, "new_tokens": LENGTH},
        }
    )


def fresh(
    engines: int, version: int, part: int = 0, long: tuple[int, ...] = ()
) -> list[Trajectory]:
    """The probe of ``version``, of held-out prompts that begin with their number; those ``long`` fill the context but for 8."""

    def worker() -> RolloutWorker:
        made = worker_with(Engine(version), config(engines))
        made._held_out_prompt = lambda index: Prompt(
            f"e{index}", index, (index, *range(55 if index in long else 3))
        )
        return made

    def actor(worker: RolloutWorker) -> SimpleNamespace:
        return SimpleNamespace(probe=SimpleNamespace(remote=worker.probe))

    group = WorkerGroup([actor(worker()) for _ in range(engines)], config(engines))
    return asyncio.run(group.fresh_tokens(version, part))


def prompts(rows: list[Trajectory]) -> list[int]:
    return [int(row.token_ids[0]) for row in rows]


@pytest.mark.parametrize("engines", [1, 2, 4, 8])
def test_no_two_engines_sample_the_same_tokens_or_of_the_same_prompt(engines):
    rows = fresh(engines, version=3)
    assert sum(row.action_tokens for row in rows) == max(TOKENS, engines * LENGTH)
    assert len(set(prompts(rows))) == len(rows)
    assert len({row.token_ids.tobytes() for row in rows}) == len(rows)


def test_each_version_and_each_part_has_prompts_of_its_own():
    probed = [*fresh(2, 0), *fresh(2, 1), *fresh(2, 1, part=1)]
    assert sorted(prompts(probed)) == list(range(12))


@pytest.mark.parametrize("version", range(6))
def test_prompts_without_room_are_passed_over(version):
    rows = fresh(2, version, long=(0, 7, 8, 19))
    assert {row.action_tokens for row in rows} == {LENGTH}
    assert not {0, 7, 8, 19} & set(prompts(rows)) and len(rows) == TOKENS / LENGTH


def test_a_task_whose_prompts_leave_no_room_at_all_is_refused_at_the_first_probe():
    with pytest.raises(ContractError, match="none of 20 held-out prompts leaves room for the 16"):
        fresh(1, 0, long=tuple(range(ITEMS)))


def answers(seed: int) -> list[bytes]:
    """What an evaluation of four held-out items samples in a run of ``seed``."""

    class Agent:
        async def run(self, context) -> Result:
            await context.generate(context.prompt.token_ids)
            return Result(0.0)

    worker = worker_with(Engine(0), config(1).model_copy(update={"seed": seed}))
    worker.agent = Agent()
    worker._held_out_prompt = lambda index: Prompt(f"e{index}", index, (index, 1, 2))
    rollouts = asyncio.run(worker.evaluate(range(4)))
    return [segment.token_ids.tobytes() for rollout in rollouts for segment in rollout.segments]


def test_an_evaluation_is_the_same_draw_for_one_seed_and_another_for_another():
    assert answers(0) == answers(0) and len(answers(0)) == 4
    assert not set(answers(0)) & set(answers(1))
