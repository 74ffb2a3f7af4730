"""The agent and the grader that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction, unwrap

from molt_core.agents import shapes
from molt_core.agents.base import Agent, Grader
from molt_core.agents.single_turn import SingleTurnAgent, exact_match
from molt_core.config import TaskConfig
from molt_core.names import named_class

BUILT_IN = "single_turn"


def agent_class(task: TaskConfig) -> Callable[..., Agent]:
    """The class that ``task`` names. Raises ValueError for a name that cannot be imported."""
    if task.agent == BUILT_IN:
        return SingleTurnAgent
    return named_class("task.agent", task.agent, BUILT_IN)


def load_agent(task: TaskConfig) -> Agent:
    """The agent that ``task`` names. Raises ValueError for a name that cannot be imported or is no agent."""
    if task.agent == BUILT_IN:
        return SingleTurnAgent(make_grader(task))
    agent = agent_class(task)(task)
    if not iscoroutinefunction(unwrap(getattr(agent, "run", None))):
        raise ValueError(f"task.agent: {task.agent!r} has no method 'async def run(self, context)'")
    return agent


def make_grader(task: TaskConfig) -> Grader:
    """The grader of a built-in task, exact match of the stripped text for rows from files."""
    if task.source == shapes.NAME:
        return shapes.ShapesVariant.from_config(task.variant).grade
    return exact_match
