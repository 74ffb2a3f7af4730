"""A rollout worker: one engine, and the agents that call it, in one Ray actor; and the loop's handle on all of them.

A group of rollouts is one remote call; its agents run side by side as coroutines and talk to the engine in the same process,
so no token crosses a process boundary on its own. Evaluation and probes use the same engine and keep books of their own.
"""

from __future__ import annotations

import asyncio
import math
import pickle
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray

from molt_core.agents.load import load_agent
from molt_core.config import RunConfig, SamplingConfig
from molt_core.data import prompt_source
from molt_core.models.load import eos_token_id, excluded_token_ids
from molt_core.render import Renderer
from molt_core.rollout.engine import Engine
from molt_core.rollout.record import Recorder
from molt_core.rollout.waves import Waves
from molt_core.types import LARGEST_REWARD, ContractError, Group, Prompt, Rollout, Trajectory


def task_without_exit(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task:
    """A task in which SystemExit is an error like others: asyncio would end its loop for it, and all other episodes with it."""

    async def contained() -> Any:
        try:
            return await coroutine
        except SystemExit as error:
            raise RuntimeError(f"sys.exit({error.code!r}) within an agent") from error

    return asyncio.Task(contained(), loop=loop, **more)


class RolloutWorker:
    """``start`` before anything else. All methods but ``busy`` run on the actor's one event loop."""

    def __init__(self, config: RunConfig, checkpoint: Path) -> None:
        self.config, self.checkpoint = config, Path(checkpoint)
        self.waves: Waves | None = None

    async def start(self) -> None:
        asyncio.get_running_loop().set_task_factory(task_without_exit)
        self.renderer = Renderer(self.checkpoint)
        self.train = prompt_source(self.config.task, split="train", seed=self.config.seed)
        self.held_out = prompt_source(self.config.task, split="eval", seed=0)
        self._held_out_prompt = lru_cache(self.config.task.eval_items)(
            lambda index: self.renderer.prompt(self.held_out.item(index), index)
        )
        self.agent = load_agent(self.config.task)
        self.engine = Engine(
            self.checkpoint,
            self.config.model,
            self.config.engine,
            excluded_token_ids(self.checkpoint),
            eos_token_id(self.checkpoint),
        )
        await self.engine.start()
        if self.config.loop.schedule == "lockstep":
            self.waves = Waves(self.engine)

    async def rollout(self, index: int, dispatched_version: int, together: int) -> Group:
        """All samples of the prompt at position ``index`` of the dispatch order.

        together: groups dispatched to this worker at the same time, this one included; they share waves under lockstep.
        """
        prompt = self.renderer.prompt(self.train.item(index), index)
        sampling = self.config.rollout.sampling
        samples = self.config.rollout.samples_per_prompt
        self._expect(together * samples)
        rollouts, generated = await self._sample(
            prompt, samples, sampling, (self.config.seed, index)
        )
        return Group(prompt.prompt_id, index, rollouts, generated, dispatched_version)

    async def evaluate(self, indices: Sequence[int]) -> list[Rollout]:
        """One rollout for each held-out item, at the evaluation's temperature; a run's seed is a draw of its own."""
        sampling = self.config.rollout.sampling.model_copy(
            update={"temperature": self.config.evaluation.temperature}
        )
        prompts = [self._held_out_prompt(index) for index in indices]
        self._expect(len(prompts))
        key = ("eval", self.config.seed)
        groups = await asyncio.gather(
            *(self._sample(prompt, 1, sampling, (*key, prompt.index)) for prompt in prompts)
        )
        return [rollouts[0] for rollouts, _ in groups]

    async def probe(
        self, numbers: Sequence[int], length: int, version: int, part: int
    ) -> list[Trajectory]:
        """A fresh continuation of ``length`` tokens for each of ``numbers``, all of ``version``.

        Each of another held-out prompt, because rounding errors of one image come together. ``part`` counts the calls for one
        version.
        """
        sampling = self.config.rollout.sampling.model_copy(
            update={"stop_at_eos": False, "max_new_tokens": length}
        )
        recorders = [
            self._recorder(
                self._prompt_with_room(number, length), sampling, ("probe", version, part, number)
            )
            for number in numbers
        ]
        self._expect(len(recorders))
        await asyncio.gather(*(self._continuation(recorder) for recorder in recorders))
        trajectories = [row for recorder in recorders for row in recorder.trajectories()]
        for row in trajectories:
            if (row.versions[row.action_mask] != version).any():
                raise ContractError(
                    f"the engine sampled a probe of version {version} from other weights"
                )
        return trajectories

    def _prompt_with_room(self, number: int, length: int) -> Prompt:
        """The held-out prompt at ``number``, or the next one that leaves room for ``length`` tokens.

        Raises ContractError where none does: at the first probe of a run, or never.
        """
        items, longest = self.config.task.eval_items, self.config.model.max_length - length
        for index in range(number, number + items):
            prompt = self._held_out_prompt(index % items)
            if len(prompt.token_ids) <= longest:
                return prompt
        raise ContractError(
            f"none of {items} held-out prompts leaves room for the {length} tokens of a probe within model.max_length "
            f"{self.config.model.max_length}: raise it, or lower probe.new_tokens"
        )

    async def _sample(
        self, prompt: Prompt, samples: int, sampling: SamplingConfig, key: tuple[int | str, ...]
    ) -> tuple[tuple[Rollout, ...], int]:
        recorders = [self._recorder(prompt, sampling, (*key, sample)) for sample in range(samples)]
        rollouts = await asyncio.gather(
            *(
                self._episode(recorder, f"{prompt.index}/{n}")
                for n, recorder in enumerate(recorders)
            )
        )
        return tuple(rollouts), sum(recorder.tokens_generated for recorder in recorders)

    async def _continuation(self, recorder: Recorder) -> None:
        with self._in_episode():
            await recorder.generate(recorder.prompt.token_ids, recorder.prompt.images)

    async def _episode(self, recorder: Recorder, rollout_id: str) -> Rollout:
        with self._in_episode():
            return await self._run_agent(recorder, rollout_id)

    def _expect(self, episodes: int) -> None:
        if self.waves is not None:
            self.waves.expect(episodes)

    def _in_episode(self) -> AbstractContextManager:
        return nullcontext() if self.waves is None else self.waves.episode()

    async def _run_agent(self, recorder: Recorder, rollout_id: str) -> Rollout:
        """Run the agent once. Its own failure loses this rollout, by name; a broken contract or engine ends the run.

        Returns when every call of the agent is answered, also those that it gave up on: their tokens are in the books.
        """
        error = None
        try:
            result = await self.agent.run(recorder)
            reward, info = float(result.reward), result.info
            if not abs(reward) <= LARGEST_REWARD:
                raise ValueError(
                    f"reward {reward} is not a number of at most {LARGEST_REWARD:g} in size: return one, or raise the reason"
                )
            pickle.dumps(info)  # as it must be to leave this process
        except (Exception, SystemExit, asyncio.CancelledError) as raised:
            # A user's program: whatever it raises is recorded and counted. A cancellation may also be ours.
            if asyncio.current_task().cancelling():
                raise
            error = raised
        await recorder.close()
        segments = recorder.trajectories()
        if error is not None:
            where = f"{type(self.agent).__name__} at prompt {recorder.prompt.index} ({recorder.prompt.prompt_id})"
            reason = f"{where}: {type(error).__name__}: {error}"
            return Rollout(rollout_id, (), float("nan"), "agent_error", {"error": reason})
        status = "ok" if any(segment.action_tokens for segment in segments) else "no_action_tokens"
        return Rollout(rollout_id, segments, reward, status, info, recorder.truncated)

    def _recorder(self, prompt: Prompt, sampling: SamplingConfig, key: tuple) -> Recorder:
        generate = (
            self.engine.generate
            if self.waves is None
            else partial(self.waves.generate, episode=key)
        )
        return Recorder(
            partial(generate, purpose=key[0] if isinstance(key[0], str) else "train"),
            prompt,
            sampling,
            self.config.model.max_length,
            key,
            self.renderer.decode,
        )

    async def pause(self) -> None:
        await self.engine.pause()

    async def receive(self, bucket: Mapping[str, Any]) -> None:
        await self.engine.receive(bucket)

    async def resume(self, version: int) -> None:
        await self.engine.resume(version)

    async def join(self, join_info: Mapping[str, Any]) -> None:
        await self.engine.join(join_info)

    @ray.method(concurrency_group="clocks")
    async def busy(self) -> tuple[list[tuple[float, float]], dict[str, int]]:
        """Stretches of decoding since the last call, and the engine's count of tokens sampled, by purpose.

        In a thread of its own: the trainer asks every step, and must not wait for the groups that are being rendered.
        """
        return self.engine.clock.take(), dict(self.engine.tokens)

    async def shutdown(self) -> None:
        self.engine.shutdown()


class WorkerGroup:
    """All workers, as the loop sees them; prompts and held-out items are shared out among them."""

    def __init__(self, workers: Sequence[Any], config: RunConfig) -> None:
        self.workers, self.config = workers, config

    @classmethod
    def create(
        cls, config: RunConfig, checkpoint: Path, places: Sequence[Mapping[str, Any]]
    ) -> Self:
        """places: of each worker, the options of its actor (``placement.Reserved.engines``)."""
        remote = ray.remote(
            max_concurrency=1000,
            concurrency_groups={"clocks": 1},
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.engine.threads)}},
        )(RolloutWorker)
        return cls([remote.options(**p).remote(config, checkpoint) for p in places], config)

    def call(self, method: str, *arguments: Any) -> list[Awaitable[Any]]:
        """``method`` on each worker; their answers to come."""
        return [getattr(worker, method).remote(*arguments) for worker in self.workers]

    async def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """``method`` on each worker; their answers."""
        return await asyncio.gather(*self.call(method, *arguments))

    def rollouts(self, indices: Sequence[int], version: int) -> list[Awaitable[Group]]:
        """The groups to come of the prompts at ``indices``, which are dispatched together at ``version``."""
        together = Counter(index % len(self.workers) for index in indices)
        return [
            self.workers[number].rollout.remote(index, version, together[number])
            for index, number in ((index, index % len(self.workers)) for index in indices)
        ]

    async def fresh_tokens(self, version: int, part: int) -> list[Trajectory]:
        """At least ``probe.tokens`` action tokens of the engines' ``version``; another ``part`` is another sample.

        No two rows are of one number, hence of one prompt and seed: what several engines sample is not the same again.
        """
        probe = self.config.probe
        length = min(probe.new_tokens, self.config.rollout.sampling.max_new_tokens)
        each = math.ceil(probe.tokens / (length * len(self.workers)))
        first = (version + part) * each * len(self.workers)
        asked = [
            worker.probe.remote(range(start, start + each), length, version, part)
            for start, worker in zip(count(first, each), self.workers)
        ]
        return sum(await asyncio.gather(*asked), [])

    async def evaluate(self) -> list[Rollout]:
        """One rollout for each held-out item."""
        shares = np.array_split(np.arange(self.config.task.eval_items), len(self.workers))
        asked = (w.evaluate.remote(share.tolist()) for w, share in zip(self.workers, shares))
        return sum(await asyncio.gather(*asked), [])

    async def clocks(self) -> tuple[list[tuple[float, float]], Counter[str]]:
        """Stretches of decoding since the last call, and tokens sampled so far by what they were for."""
        stretches, tokens = [], Counter()
        for stretches_of_one, sampled in await self.everywhere("busy"):
            stretches += stretches_of_one
            tokens.update(sampled)
        return stretches, tokens
