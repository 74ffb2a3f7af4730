"""What an agent sees of the engine, and the trajectory written down behind its back.

The agent asks for continuations of token ids; the recorder keeps exactly the ids that went in and came out. A later call that
extends the ids of an earlier one goes on in its segment (what was added is context, mask False); any other call starts a new
segment. Nothing is ever re-tokenised.

A call is the recorder's, not the agent's: an agent that gives up on one (a timeout, the first of two answers, a tool that
fails beside it) leaves it running, and it is answered and written down like any other before the episode ends.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from molt_core.agents.base import Generation
from molt_core.config import SamplingConfig
from molt_core.render import collapse
from molt_core.rollout.engine import EngineError, Sampled
from molt_core.types import NOT_SAMPLED, ContractError, ImageInput, Prompt, Trajectory, Turn


def request_seed(*key: int | str) -> int:
    """A 31-bit seed that is a function of (run seed, prompt, sample, number of the call) and of nothing else."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@dataclass
class _Segment:
    token_ids: list[int]
    prompt_length: int
    images: tuple[ImageInput, ...]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    routes: np.ndarray | None = None

    def begins(self, token_ids: list[int], images: tuple[ImageInput, ...]) -> bool:
        """Whether all of it is how ``token_ids`` and ``images`` begin."""
        same_tokens = token_ids[: len(self.token_ids)] == self.token_ids
        return same_tokens and images[: len(self.images)] == self.images

    def append(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, versions: Sequence[int] | None
    ) -> None:
        sampled = logprobs is not None
        self.token_ids += [int(token) for token in ids]
        self.mask += [sampled] * len(ids)
        self.logprobs += list(logprobs) if sampled else [0.0] * len(ids)
        self.versions += list(versions) if sampled else [NOT_SAMPLED] * len(ids)

    def add_routes(self, routes: np.ndarray | None) -> None:
        """``routes`` of all positions from the first on. Those of an earlier turn stay: they are what its actions came from."""
        if routes is not None:
            known = routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([known, routes[len(known) :]])

    def _routed_experts(self) -> np.ndarray | None:
        """Of every token; the last one was never computed."""
        if self.routes is None:
            return None
        absent = (len(self.token_ids) - len(self.routes), *self.routes.shape[1:])
        return np.concatenate([self.routes, np.full(absent, NOT_SAMPLED, self.routes.dtype)])

    def trajectory(self) -> Trajectory:
        length = len(self.token_ids)
        return Trajectory(
            token_ids=np.array(self.token_ids, np.int32),
            prompt_length=self.prompt_length,
            action_mask=np.array(self.mask, bool),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            mixed=np.zeros(length, bool),  # every refit recomputes the KV cache
            turns=tuple(self.turns),
            images=tuple(replace(image, pixels=None) for image in self.images),
            routed_experts=self._routed_experts(),
        )


class Recorder:
    """The context of one rollout: an agent calls ``generate``; ``trajectories`` is what it did."""

    def __init__(
        self,
        generate: Callable[..., Awaitable[Sampled]],
        prompt: Prompt,
        sampling: SamplingConfig,
        max_length: int,
        seed_key: tuple[int | str, ...],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self.prompt = prompt
        self._generate, self._sampling, self._max_length = generate, sampling, max_length
        self._seed_key, self._decode = seed_key, decode
        self._segments: list[_Segment] = []
        self._calls = 0
        self._open: set[asyncio.Task] = set()
        self._closed = False
        self._failure: ContractError | EngineError | None = None
        self.tokens_generated = 0
        self.truncated = False
        """Whether the last answer was cut off, or there was no room for one."""

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput] = ()
    ) -> Generation:
        """Sample a continuation of ``token_ids`` (after image expansion) and record it.

        Where no room is left the answer is empty with finish reason "length". Raises ContractError where the engine expanded
        the prompt differently, RuntimeError where the episode is over, ValueError where there is nothing to go on from.
        """
        if self._closed:
            raise RuntimeError("the episode is over: its agent has returned or failed")
        token_ids, images = list(token_ids), tuple(images)
        if not token_ids:
            raise ValueError("generate was given no token to go on from")
        room = min(self._sampling.max_new_tokens, self._max_length - len(token_ids))
        if room <= 0:
            self.truncated = True
            return Generation((), "", "length")
        number, self._calls = self._calls, self._calls + 1
        seed = request_seed(*self._seed_key, number)
        call = asyncio.ensure_future(self._call(token_ids, images, room, seed))
        self._open.add(call)
        call.add_done_callback(self._open.discard)
        return await asyncio.shield(call)

    async def close(self) -> None:
        """The episode is over: no further call; returns when the last one is answered."""
        self._closed = True
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _call(
        self, token_ids: list[int], images: tuple[ImageInput, ...], room: int, seed: int
    ) -> Generation:
        try:
            sampled = await self._generate(
                collapse(token_ids, images),
                images,
                temperature=self._sampling.temperature,
                max_new_tokens=room,
                seed=seed,
                stop_at_eos=self._sampling.stop_at_eos,
            )
            if list(sampled.prompt_token_ids) != token_ids:
                raise ContractError(
                    f"engine and renderer expand prompt {self.prompt.prompt_id} differently: "
                    f"{len(sampled.prompt_token_ids)} and {len(token_ids)} tokens"
                )
        except (ContractError, EngineError) as error:
            self._failure = self._failure or error
            raise
        # Placed and written down only now: a call that failed leaves the rollout as it was, and a call that ran beside
        # this one may have extended the segment.
        self.tokens_generated += len(sampled.token_ids)
        self.truncated = sampled.finish_reason == "length"
        segment, feedback = self._place(token_ids, images)
        segment.append(feedback, None, None)
        segment.images = images
        start = len(segment.token_ids)
        segment.append(sampled.token_ids, sampled.logprobs, sampled.versions)
        segment.add_routes(sampled.routed_experts)
        segment.turns.append(
            Turn(
                start,
                len(segment.token_ids),
                self._sampling.model_dump(),
                seed,
                sampled.finish_reason,
            )
        )
        ids = tuple(int(token) for token in sampled.token_ids)
        return Generation(ids, self._decode(ids), sampled.finish_reason)

    def _place(
        self, token_ids: list[int], images: tuple[ImageInput, ...]
    ) -> tuple[_Segment, list[int]]:
        """The segment that this call goes on with, the longest where it is several, and the context that was added to it."""
        extended = [segment for segment in self._segments if segment.begins(token_ids, images)]
        if extended:
            segment = max(extended, key=lambda segment: len(segment.token_ids))
            return segment, token_ids[len(segment.token_ids) :]
        segment = _Segment([], len(token_ids), images)
        segment.append(token_ids, None, None)
        self._segments.append(segment)
        return segment, []

    def trajectories(self) -> tuple[Trajectory, ...]:
        """What was sampled, once ``close`` has returned.

        Raises the first failure of the engine or the contract, also where the agent caught it.
        """
        if self._failure is not None:
            raise self._failure
        return tuple(segment.trajectory() for segment in self._segments)
