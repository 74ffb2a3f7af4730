"""A YAML file that knows its lines, so that an error can point at what a person typed.

Scalars follow YAML 1.2: ``1e-3`` is a number, ``00:30:00`` a text and ``no`` a word (PyYAML alone reads YAML 1.1, where
these are a text, the number 1800 and False). A key that appears twice is an error: the first would be lost silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.problems import Finding, Problem, SpecError
from harness.redaction import refused

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict = {}


for _tag, _pattern, _first_characters in (
    ("null", r"|~|null|Null|NULL", ["", *"~nN"]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first_characters
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Decimal or 0x; a leading zero does not mean octal, as it does in YAML 1.1."""
    text = node.value
    return int(text, 16) if text.lower().startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass(frozen=True)
class Document:
    """A parsed file: ``data`` as Python objects, ``line`` of a key path."""

    path: Path
    data: dict[str, Any]
    root: yaml.Node

    def line(self, *candidates: KeyPath) -> int:
        """Line (from 1) of the candidate whose deepest keys are there; earlier candidates win ties."""
        found = [(len(candidate), *self._descend(candidate)) for candidate in candidates]
        return min(found, key=lambda place: place[0] - place[1])[2]

    def problem(self, finding: Finding, *places: KeyPath) -> Problem:
        """``finding`` with the line of the first place that is there, under the name of the last."""
        return Problem(self.line(*places), dotted(places[-1]), finding.what, finding.fix)

    def _descend(self, path: KeyPath) -> tuple[int, int]:
        node, line = self.root, self.root.start_mark.line + 1
        for depth, key in enumerate(path):
            if isinstance(node, yaml.MappingNode):
                found = [(k, v) for k, v in node.value if k.value == str(key)]
                if not found:
                    return depth, line
                line, node = found[0][0].start_mark.line + 1, found[0][1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
                if key >= len(node.value):
                    return depth, line
                node = node.value[key]
                line = node.start_mark.line + 1
            else:
                return depth, line
        return len(path), line


def dotted(place: KeyPath) -> str:
    """systems.ours.trainer, endpoints[0].field."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in place).lstrip(".")


def read(path: str | Path) -> Document:
    """Parse ``path``. Raises SpecError for a file that is absent, not YAML, not a mapping, repeats a key or tells a secret."""
    path = Path(path)
    if not path.is_file():
        raise SpecError(
            path, [Problem(0, "", "there is no such file", "Give the path of an experiment")]
        )
    loader = None
    try:
        loader = _Loader(path.read_text())
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise SpecError(
                path, [Problem(1, "", "is not a mapping", "Start with `name:`, `question:`, ...")]
            )
        faults = [*_repeated(root, ""), *_secrets(root, "", "")]
        if faults:
            raise SpecError(path, faults)
        return Document(path, loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise SpecError(
            path, [Problem(line, "", f"is not YAML: {error.problem}", "Mend the syntax there")]
        ) from error
    except SpecError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        # Bytes that are no text, an anchor inside itself, a list as a key, a tag that its value does not fit: untrusted input.
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(
            path, [Problem(1, "", f"cannot be read: {said}", "Write plain YAML in UTF-8")]
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def _repeated(node: yaml.Node, key: str) -> Iterator[Problem]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            line, inner = name.start_mark.line + 1, f"{key}.{name.value}".lstrip(".")
            if name.value in seen and name.tag != "tag:yaml.org,2002:merge":
                yield Problem(
                    line, inner, f"is given twice (first in line {seen[name.value]})", "Keep one"
                )
            seen[name.value] = line
            yield from _repeated(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            yield from _repeated(value, f"{key}[{position}]")


def _secrets(node: yaml.Node, key: str, name: str) -> Iterator[Problem]:
    """``name``: the last key of ``key`` that is a word."""
    if isinstance(node, yaml.MappingNode):
        for inner, value in node.value:
            yield from _secrets(value, f"{key}.{inner.value}".lstrip("."), str(inner.value))
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            yield from _secrets(value, f"{key}[{position}]", name)
    elif node.tag == "tag:yaml.org,2002:str" and refused(name, node.value):
        yield Problem(
            node.start_mark.line + 1,
            key,
            "has a secret in it, and everything written here is copied beside the runs",
            "Name the variable without a value (`environment: {HF_TOKEN: }` in the cluster's profile) and export it in the "
            "shell that submits",
        )
