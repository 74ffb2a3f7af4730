"""Estimators and losses by name, and a user's own from a file.

# my_loss.py, named in algorithm.plugins
from molt_core.algo.losses import register_loss

@register_loss("mine")
def mine(tokens, config): ...
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Function = TypeVar("Function", bound=Callable)


class Registry(Generic[Function]):
    """Functions of one kind by name. ``kind`` is the configuration key that chooses one, for messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Function] = {}

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator. Raises ValueError where another function has the name."""

        def add(function: Function) -> Function:
            known = self._functions.get(name)
            if known is not None and known.__code__ != function.__code__:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            self._functions[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> Function:
        if name not in self._functions:
            raise ValueError(
                f"{self.kind}: {name!r} is unknown; choose one of {sorted(self._functions)}"
            )
        return self._functions[name]


def load_plugins(paths: Sequence[str]) -> None:
    """Run users' Python files, which register what they define. Raises ValueError that names the file."""
    for path in paths:
        try:
            runpy.run_path(path)
        except Exception as error:  # whatever a user's file raises, the message must name it
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"algorithm.plugins: {path}: {reason}") from error
