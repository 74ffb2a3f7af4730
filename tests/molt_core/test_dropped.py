"""A run that gets no group to train on ends, and says why."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from molt_core.agents.base import Result
from molt_core.config import RunConfig, SamplingConfig
from molt_core.loop import EverythingDropped, Loop
from molt_core.metrics import RunWriter
from molt_core.rollout.worker import RolloutWorker, WorkerGroup
from molt_core.types import Batch, ContractError, Prompt
from tests.molt_core.make import group
from tests.molt_core.test_record import FIRST, Scripted

CONFIG = RunConfig.model_validate(
    {
        "model": {"builtin": "tiny-qwen3-vl-moe"},
        "task": {"source": "shapes"},
        "rollout": {"groups_per_step": 2, "samples_per_prompt": 2},
    }
)


async def first_batch(loop: Loop, rollout) -> Batch:
    """What the loop takes as its first batch where ``rollout`` is what its one worker does."""
    actor = SimpleNamespace(rollout=SimpleNamespace(remote=rollout))
    loop.workers = WorkerGroup([actor], CONFIG)
    loop._dispatch()
    try:
        return await asyncio.wait_for(loop._until(loop.pool.take), 5)
    finally:
        for task in loop.tasks:
            task.cancel()


class NotANumber:
    async def run(self, context):
        await context.generate(context.prompt.token_ids)
        return Result(float("nan"))


def test_a_reward_that_is_no_number_never_reaches_the_estimator_and_is_named(tmp_path, capsys):
    from molt_core.rollout.record import Recorder

    worker = RolloutWorker(None, "unused")
    worker.agent = NotANumber()
    loop = Loop(CONFIG, tmp_path, RunWriter(tmp_path, attempt=1, steps=4))

    async def rollout(index: int, version: int, together: int):
        prompt = Prompt(loop.pool._prompt_id(index), index, (5, 6))
        recorder = Recorder(
            Scripted(FIRST).generate, prompt, SamplingConfig(), 32, (1, index, 0), str
        )
        lost = await worker._episode(recorder, f"{index}/0")
        made = group(index, prompt_id=prompt.prompt_id)
        generated = made.rollouts[1].action_tokens + recorder.tokens_generated
        return replace(made, rollouts=(lost, made.rollouts[1]), tokens_generated=generated)

    with pytest.raises(EverythingDropped) as raised:
        asyncio.run(first_batch(loop, rollout))
    message = str(raised.value)
    assert "'agent_error': " in message
    assert (
        "NotANumber at prompt " in message
        and "reward nan is not a number of at most 1e+30" in message
    )
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(printed) == 1 and "NotANumber at prompt 0 (" in printed[0]
    loop.pool.check()


def test_a_group_that_the_books_refuse_ends_the_run_with_the_reason(tmp_path):
    loop = Loop(CONFIG, tmp_path, RunWriter(tmp_path, attempt=1, steps=4))

    async def rollout(index: int, version: int, together: int):
        return group(index, prompt_id="of other data")

    with pytest.raises(ContractError, match="group 0 is of prompt of other data"):
        asyncio.run(first_batch(loop, rollout))
