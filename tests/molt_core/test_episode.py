"""One group of episodes without vLLM: what its agents leave open or do wrong, and what the books say of it."""

import asyncio
import sys
import threading
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from molt_core.agents.base import Result
from molt_core.config import RunConfig
from molt_core.metrics import RewardSums
from molt_core.rollout.engine import EngineError, Sampled
from molt_core.rollout.pool import Pool
from molt_core.rollout.waves import Waves
from molt_core.rollout.worker import RolloutWorker, task_without_exit
from molt_core.types import Group, Prompt

CONFIG = RunConfig.model_validate(
    {
        "model": {"builtin": "tiny-qwen3-vl-moe", "max_length": 32},
        "task": {"source": "shapes"},
        "rollout": {"groups_per_step": 1, "samples_per_prompt": 2},
    }
)
TOKENS = 3
"""What each call samples."""


async def turns(count: int) -> None:
    """Let the event loop turn ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


class Engine:
    """Counts as the true one does. Each answer takes longer than the one before; ``broken`` is raised instead of one."""

    def __init__(self, broken: Exception | None = None) -> None:
        self.tokens: Counter[str] = Counter()
        self.broken, self.asked = broken, 0
        self.waves: list[int] = []

    async def generate(self, prompt_ids, images, *, purpose, **options) -> Sampled:
        self.asked += 1
        await turns(5 * self.asked)
        if self.broken:
            raise self.broken
        self.tokens[purpose] += TOKENS
        sampled = np.arange(TOKENS, dtype=np.int32)
        logprobs, versions = np.full(TOKENS, -1.0, np.float32), np.zeros(TOKENS, np.int32)
        return Sampled(sampled, logprobs, versions, "stop", list(prompt_ids))

    async def generate_together(self, calls) -> list[Sampled]:
        self.waves.append(len(calls))
        return await asyncio.gather(*(self.generate(*given, **named) for given, named in calls))


def worker_with(engine, config: RunConfig = CONFIG) -> RolloutWorker:
    worker = RolloutWorker(config, "unused")
    worker.engine, worker.renderer = engine, SimpleNamespace(decode=str)
    return worker


async def group_of(agent, engine: Engine, lockstep: bool = False) -> Group:
    worker = worker_with(engine)
    worker.agent = agent
    worker.waves = Waves(engine) if lockstep else None
    samples = CONFIG.rollout.samples_per_prompt
    worker._expect(samples)
    sampled = worker._sample(Prompt("p0", 0, (5, 6)), samples, CONFIG.rollout.sampling, (0, 0))
    return Group("p0", 0, *await asyncio.wait_for(sampled, 5), 0)


class FirstOfTwo:
    async def run(self, context):
        asked = [asyncio.ensure_future(context.generate([5, 6])) for _ in range(2)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return Result(1.0)


class BrokenTool:
    async def run(self, context):
        async def tool():
            await asyncio.sleep(0)
            raise RuntimeError("the tool broke")

        await asyncio.gather(context.generate([5, 6]), context.generate([5, 7]), tool())


class GivesUp:
    async def run(self, context):
        first = await context.generate([5, 6])
        with suppress(TimeoutError):
            await asyncio.wait_for(context.generate([5, 6, *first.token_ids, 9]), 1e-9)
        return Result(1.0)


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize(
    ("agent", "reason"), [(FirstOfTwo(), None), (BrokenTool(), "agent_error"), (GivesUp(), None)]
)
def test_calls_that_an_agent_gave_up_on_are_answered_and_in_the_books(agent, reason, lockstep):
    """Two calls an episode and two episodes: 12 tokens, all of them trained, or all dropped."""
    engine = Engine()
    group = asyncio.run(group_of(agent, engine, lockstep))
    pool = Pool(CONFIG.rollout, CONFIG.loop, lambda index: f"p{index}")
    pool.dispatch()
    assert pool.finish(group) == reason
    pool.check()
    assert engine.tokens["train"] == group.tokens_generated == 4 * TOKENS
    assert group.action_tokens == (0 if reason else 4 * TOKENS)


def test_an_episode_whose_agent_failed_beside_its_call_is_in_the_wave_that_it_asked_for():
    class FailsFirst:
        episodes = 0

        async def run(self, context):
            self.episodes += 1
            if self.episodes == 1:
                return await BrokenTool().run(context)
            await turns(20)
            await context.generate([5, 6])
            return Result(1.0)

    engine = Engine()
    asyncio.run(group_of(FailsFirst(), engine, lockstep=True))
    assert engine.waves == [3]


def test_an_engine_that_fails_a_call_nobody_waits_for_ends_the_run():
    with pytest.raises(EngineError, match="dead"):
        asyncio.run(group_of(BrokenTool(), Engine(EngineError("dead"))))


def test_what_an_agent_started_asks_for_nothing_after_its_end():
    class Stray:
        tasks = []

        async def run(self, context):
            async def later():
                await asyncio.sleep(0.01)
                await context.generate([5, 6])

            await context.generate([5, 6])
            self.tasks.append(asyncio.ensure_future(later()))
            return Result(1.0)

    async def both():
        engine = Engine()
        group = await group_of(Stray(), engine)
        for error in await asyncio.gather(*Stray.tasks, return_exceptions=True):
            assert isinstance(error, RuntimeError) and "the episode is over" in str(error)
        assert engine.tokens["train"] == group.tokens_generated == 2 * TOKENS

    asyncio.run(both())


class Talks:
    """Goes on with a tool's two tokens until an answer does not end by itself; then, if ``shortens``, from the prompt anew."""

    def __init__(self, shortens: bool = False) -> None:
        self.shortens = shortens

    async def run(self, context):
        ids, answer = list(context.prompt.token_ids), None
        while answer is None or answer.finish_reason == "stop":
            answer = await context.generate(ids)
            ids += [*answer.token_ids, 9, 9]
        if self.shortens:
            await context.generate(context.prompt.token_ids)
        return Result(1.0)


@pytest.mark.parametrize(("agent", "truncated"), [(Talks(), 1.0), (Talks(shortens=True), 0.0)])
def test_an_episode_that_ran_out_of_context_is_a_truncated_one(agent, truncated):
    sums = RewardSums()
    sums.add(asyncio.run(group_of(agent, Engine())))
    assert sums.take()["truncated_fraction"] == truncated


class Returns:
    """Generates once in each episode; the first of them returns ``result``."""

    def __init__(self, result) -> None:
        self.results = [result, Result(1.0)]

    async def run(self, context):
        await context.generate(context.prompt.token_ids)
        return self.results.pop(0)


class Raises(Returns):
    async def run(self, context):
        result = await super().run(context)
        if isinstance(result, BaseException):
            raise result
        return result


class GoesOnFromNothing:
    first = True

    async def run(self, context):
        first, self.first = self.first, False
        await context.generate([] if first else [5, 6])
        return Result(1.0)


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (Returns(None), "AttributeError: 'NoneType' object has no attribute 'reward'"),
        (Returns(Result(None)), "TypeError: float"),
        (Returns(Result(float("nan"))), "ValueError: reward nan is not a number of at most 1e+30"),
        (Returns(Result(-1e31)), "ValueError: reward -1e+31 is not a number of at most 1e+30"),
        (Returns(Result(1.0, {"lock": threading.Lock()})), "TypeError: cannot pickle"),
        (Raises(SystemExit("the grader left")), "SystemExit: the grader left"),
        (Raises(asyncio.CancelledError()), "CancelledError: "),
        (GoesOnFromNothing(), "ValueError: generate was given no token to go on from"),
    ],
)
def test_what_an_agent_does_wrong_loses_its_rollout_and_no_more(agent, why):
    failed, sound = asyncio.run(group_of(agent, Engine())).rollouts
    assert (failed.status, failed.segments) == ("agent_error", ())
    assert failed.info["error"].startswith(f"{type(agent).__name__} at prompt 0 (p0): {why}")
    assert (sound.status, sound.action_tokens) == ("ok", TOKENS)


def test_a_cancellation_that_is_not_the_agent_s_is_no_failure_of_it():
    worker = worker_with(Engine())
    worker.agent = Returns(Result(1.0))
    recorder = worker._recorder(Prompt("p0", 0, (5, 6)), CONFIG.rollout.sampling, (0, 0, 0))

    async def cancelled():
        task = asyncio.ensure_future(worker._episode(recorder, "0/0"))
        await turns(3)
        task.cancel()
        return await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_an_exit_in_a_task_beside_a_call_loses_one_rollout_and_not_the_loop():
    """asyncio ends its loop for a SystemExit in any task, and with it every other episode of the actor."""

    class Agent:
        async def run(self, context) -> Result:
            async def tool():
                sys.exit("no such file")

            await asyncio.gather(context.generate([1, 2]), tool())
            return Result(1.0)

    async def play() -> Group:
        asyncio.get_running_loop().set_task_factory(task_without_exit)
        return await group_of(Agent(), Engine())

    group = asyncio.run(play())
    assert [rollout.status for rollout in group.rollouts] == ["agent_error"] * 2
    assert "sys.exit('no such file')" in group.error
