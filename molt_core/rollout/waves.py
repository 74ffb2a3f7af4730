"""Lockstep in the engine: requests go to it in waves, so that what is computed together never depends on timing.

The last bits of a log-probability depend on what else is in the same forward pass. A free-running engine computes whatever
has arrived; here the requests of all running episodes are collected, ordered, handed over while the engine stands still with
empty caches, and only then computed. The next wave follows when every episode has asked again or has ended. An agent that
makes one call at a time is thereby repeated bit for bit; calls side by side within an episode may fall into either wave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from molt_core.rollout.engine import Engine, Sampled


@dataclass(frozen=True)
class _Call:
    order: tuple
    arguments: tuple[tuple, dict[str, Any]]
    episode: Hashable
    answer: asyncio.Future


class Waves:
    """The engine as episodes see it under lockstep. All methods belong to one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._episodes = 0
        self._calls: list[_Call] = []
        self._wave: asyncio.Task | None = None

    def expect(self, episodes: int) -> None:
        """``episodes`` belong together: no wave starts before each of them has called or ended. The first word counts.

        Together is what is dispatched at once; whoever of them arrives first announces them all.
        """
        if self._episodes == 0:
            self._episodes = episodes

    @contextmanager
    def episode(self):
        """The life of one expected episode."""
        try:
            yield
        finally:
            self._episodes -= 1
            self._start_if_complete()

    async def generate(
        self, prompt_ids, images, *, seed: int, episode: Hashable, **sampling: Any
    ) -> Sampled:
        """As ``Engine.generate``; ``episode`` is who asks."""
        answer = asyncio.get_running_loop().create_future()
        arguments = ((prompt_ids, images), {"seed": seed, **sampling})
        self._calls.append(_Call((seed, tuple(prompt_ids)), arguments, episode, answer))
        self._start_if_complete()
        return await answer

    def _start_if_complete(self) -> None:
        asking = {call.episode for call in self._calls}
        if self._wave is None and asking and len(asking) == self._episodes:
            self._wave = asyncio.create_task(self._run())

    async def _run(self) -> None:
        calls, self._calls = sorted(self._calls, key=lambda call: call.order), []
        try:
            results = await self._engine.generate_together([call.arguments for call in calls])
        except Exception as error:  # whoever asked hears of it
            results = [error] * len(calls)
        for call, result in zip(calls, results):
            if call.answer.done():  # whoever asked has gone
                continue
            if isinstance(result, Exception):
                call.answer.set_exception(result)
            else:
                call.answer.set_result(result)
        self._wave = None
        self._start_if_complete()  # a call beside those of this wave may be all that is left
