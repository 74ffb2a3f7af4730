"""Estimators and losses by name, and a user's own from a file.

# my_loss.py, named in algorithm.plugins
from molt_core.algo.losses import register_loss

@register_loss("mine")
def mine(tokens, config): ...

Such a file stands alone: it imports what is installed, and not the files beside it, which no run's identity would know of.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Generic, TypeVar

Function = TypeVar("Function", bound=Callable)

_loading: ContextVar[tuple[Path | None, set[str]]] = ContextVar(
    "the user's file that is being run, and what it has registered", default=(None, set())
)


class Registry(Generic[Function]):
    """Functions of one kind by name. ``kind`` is the configuration key that chooses one, for messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Function] = {}
        self._files: dict[str, Path | None] = {}
        """The user's file that each came from, None for what is built in."""

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator. Raises ValueError where the name is taken, unless by an earlier loading of the same file."""

        def add(function: Function) -> Function:
            file, registered = _loading.get()
            again = file is not None and self._files.get(name) == file
            if name in self._functions and (not again or f"{self.kind} {name}" in registered):
                owner = self._files[name] or "molt_core"
                raise ValueError(
                    f"{self.kind} {name!r} is registered already, by {owner}; choose another name"
                )
            self._functions[name], self._files[name] = function, file
            registered.add(f"{self.kind} {name}")
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
        file = Path(path).resolve()
        token = _loading.set((file, set()))
        try:
            runpy.run_path(path)
        except Exception as error:  # whatever a user's file raises, the message must name it
            reason = f"{type(error).__name__}: {error}"
            missing = (getattr(error, "name", None) or "").partition(".")[0]
            if isinstance(error, ModuleNotFoundError) and _lies_beside(missing, file):
                reason += "; a plug-in is one file: put what it needs of the files beside it into it, or install them"
            raise ValueError(f"algorithm.plugins: {path}: {reason}") from error
        finally:
            _loading.reset(token)


def _lies_beside(module: str, file: Path) -> bool:
    return file.with_name(f"{module}.py").is_file() or file.with_name(module).is_dir()
