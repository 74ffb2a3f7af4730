"""The agent and the grader that a configuration names."""

from __future__ import annotations

import importlib

from molt_core.agents import shapes
from molt_core.agents.base import Agent, Grader
from molt_core.agents.single_turn import SingleTurnAgent, exact_match
from molt_core.config import TaskConfig


def load_agent(task: TaskConfig) -> Agent:
    """The agent that ``task`` names. Raises ValueError for a name that cannot be imported or is no agent."""
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
    if task.source == shapes.NAME:
        return shapes.ShapesVariant.from_config(task.variant).grade
    return exact_match
