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

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from molt_core.config import TaskConfig
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
    """The reward of one episode, and anything worth keeping beside it."""

    reward: float
    info: Mapping[str, Any] = field(default_factory=dict)


class Context(Protocol):
    """What an agent sees of the world: its prompt, and a policy to sample from."""

    prompt: Prompt

    async def generate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput] = ()
    ) -> Generation:
        """Sample one stretch of actions after ``token_ids`` (images expanded, their spans in ``images``)."""
        ...


@runtime_checkable
class Agent(Protocol):
    """One instance serves all episodes of a worker at once: keep what belongs to an episode in local variables of ``run``."""

    async def run(self, context: Context) -> Result: ...


def load_agent(task: TaskConfig) -> Agent:
    """The agent that ``task`` names. Raises ValueError for a name that cannot be imported or is no agent."""
    from molt_core.agents.single_turn import SingleTurnAgent

    if task.agent == "single_turn":
        return SingleTurnAgent(make_grader(task))
    module, _, attribute = task.agent.partition(":")
    if not attribute:
        raise ValueError(
            f"task.agent: {task.agent!r} is neither 'single_turn' nor 'package.module:Class'"
        )
    try:
        agent = getattr(importlib.import_module(module), attribute)(task)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task.agent: {task.agent!r} cannot be imported: {error}") from error
    if not isinstance(agent, Agent):
        raise ValueError(f"task.agent: {task.agent!r} has no method 'async def run(self, context)'")
    return agent


def make_grader(task: TaskConfig) -> Grader:
    """The grader of a built-in task, exact match of the stripped text for rows from files."""
    from molt_core.agents import shapes, single_turn

    if task.source == shapes.NAME:
        return shapes.ShapesVariant.from_config(task.variant).grade
    return single_turn.exact_match
