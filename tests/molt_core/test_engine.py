"""The engine's actor and vLLM's own process. What it generates is tested where it is used: rollouts, refits, whole runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from molt_core.rollout import engine
from molt_core.rollout.engine import Engine, EngineError
from molt_core.train.__main__ import own_words, reason_of


def over(vllm: SimpleNamespace) -> Engine:
    """An engine over a stand-in of vLLM's."""
    made = Engine.__new__(Engine)
    made._llm = vllm
    return made


async def no_answer(**_):
    await asyncio.Event().wait()


@pytest.mark.parametrize(("call", "arguments"), [("pause", ()), ("resume", (1,))])
def test_a_call_that_a_dead_process_owes_an_answer_to_fails(call, arguments, monkeypatch):
    """vLLM leaves it waiting for ever, and with it the refit and the run."""
    monkeypatch.setattr(engine, "DEAD_AFTER_S", 0.01)
    names = ("pause_generation", "start_weight_update", "finish_weight_update", "resume_generation")
    vllm = SimpleNamespace(errored=False, **{name: no_answer for name in names})

    async def die_meanwhile():
        asked = asyncio.create_task(getattr(over(vllm), call)(*arguments))
        await asyncio.sleep(0.05)
        assert not asked.done()  # a slow answer is none that will not come
        vllm.errored = True
        await asked

    with pytest.raises(EngineError, match="the engine's own process is dead"):
        asyncio.run(asyncio.wait_for(die_meanwhile(), 5))


def test_a_run_says_the_error_and_not_the_stacks_of_the_actors_that_it_passed():
    dead = EngineError("the engine's own process is dead")
    at_worker = RayTaskError("receive", "a stack\nof many lines", dead).as_instanceof_cause()
    at_trainer = RayTaskError("send_weights", "more lines", at_worker).as_instanceof_cause()
    assert reason_of(at_trainer) == "ENGINE"
    assert own_words(at_trainer) == "the engine's own process is dead"
