"""What is wrong with an experiment, said so that a person can mend it: file, line, key, what, and the fix.

pydantic finds the problems; ``translate`` turns its words into ours. All problems of a file are reported at once.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to mend. ``line`` 0: the file as a whole."""

    line: int
    key: str
    what: str
    fix: str


class SpecError(ValueError):
    """An experiment that cannot be run as written. ``problems`` holds each one; nothing was started."""

    def __init__(self, path: str | Path, problems: Iterable[Problem]) -> None:
        self.path = Path(path)
        self.problems = tuple(dict.fromkeys(sorted(problems)))
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [
            f"{self.path}{f':{problem.line}' if problem.line else ''}: "
            f"{f'{problem.key}: ' if problem.key else ''}{problem.what}. {problem.fix}"
            f"{'' if problem.fix.endswith('?') else '.'}"
            for problem in self.problems
        ]
        count = len(lines)
        return "\n".join([*lines, f"{count} problem{'s' * (count != 1)}; nothing was started."])


@dataclass(frozen=True)
class Finding:
    """A translated pydantic error: where inside the validated object, what, and how to mend it."""

    location: tuple[str | int, ...]
    what: str
    fix: str


def translate(error: ValidationError, model: type[BaseModel]) -> list[Finding]:
    """Every error of ``error``, raised by validating ``model``, in our words."""
    return [_translate(item, model) for item in error.errors()]


def _translate(item: dict[str, Any], model: type[BaseModel]) -> Finding:
    location = tuple(item["loc"])
    kind = item["type"]
    if kind == "extra_forbidden":
        known = sorted(fields_at(model, location[:-1]))
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        fix = f"Did you mean `{close[0]}`?" if close else f"Known keys: {', '.join(known)}"
        return Finding(location, "is not a known key", fix)
    if kind == "missing":
        field = fields_at(model, location[:-1]).get(str(location[-1]))
        about = f" ({field.description})" if field is not None and field.description else ""
        return Finding(location, "is missing", f"Add `{location[-1]}: ...`{about}")
    if kind == "value_error":
        what, _, fix = item["msg"].removeprefix("Value error, ").partition("; ")
        return Finding(location, what, _sentence(fix) or "Change one of the values it names")
    what = item["msg"].replace("Input should be", "must be").replace("Value should", "must")
    what = what[0].lower() + what[1:]
    return Finding(location, f"{what}, not {item['input']!r}", "Change the value")


def fields_at(model: type[BaseModel], location: Iterable[str | int]) -> dict[str, Any]:
    """The fields of the model that ``location`` leads to inside ``model``; {} where it leads to a plain value."""
    current: type[BaseModel] | None = model
    for key in location:
        if current is None:
            return {}
        # an item's position, a mapping's key and a union member's name lead to the model already entered
        if key in current.model_fields:
            current = section(current.model_fields[key].annotation)
    return dict(current.model_fields) if current is not None else {}


def section(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside ``X``, ``X | None``, ``tuple[X, ...]`` or ``dict[str, X]``; None for plain values."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    for argument in typing.get_args(annotation):
        found = section(argument)
        if found is not None:
            return found
    return None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
