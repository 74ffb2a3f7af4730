"""The agent contract: an agent is an ordinary Python program that produces actions and a reward.

It asks its context for tokens as often as it likes, runs whatever it must in between (tools, judges, environments), and
returns a reward. It never builds a trajectory: the context records each generation with its log-probabilities and versions,
so that an agent cannot train on a token that nobody sampled.

    class Twice:
        def __init__(self, task): ...
        async def run(self, context):
            draft = await context.generate(context.prompt.token_ids, context.prompt.images)
            ...
            return Result(reward=1.0)

Name it in the configuration as ``task.agent: package.module:Twice``; the class is built once with the TaskConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from molt_core.types import ImageInput, Prompt

Grader = Callable[[Any, str], float]
"""``grader(answer, text) -> reward``: how well the decoded text answers."""


@dataclass(frozen=True)
class Generation:
    """What the policy sampled: ids (end of turn included, where sampled), their text without special tokens, and why it ended.

    finish_reason: "stop" (end of turn) or "length" (max_new_tokens).
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Result:
    """The reward of one episode, at most ``types.LARGEST_REWARD`` in size, and anything worth keeping that pickles."""

    reward: float
    info: Mapping[str, Any] = field(default_factory=dict)


class Context(Protocol):
    """What an agent sees of the world: its prompt, and a policy to sample from."""

    prompt: Prompt

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput] = ()
    ) -> Generation:
        """Sample one stretch of actions after ``token_ids`` (images expanded, their spans in ``images``).

        Calls may run side by side. One that is given up on is answered even so, and is as much a part of the episode, which
        lasts until then.
        """
        ...


class Agent(Protocol):
    """One instance serves all episodes of a worker at once: keep what belongs to an episode in local variables of ``run``."""

    async def run(self, context: Context) -> Result: ...
