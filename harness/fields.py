"""What a run's record may hold, so that an endpoint on a field that nobody records is refused before the runs are paid for.

The trainer's own fields are in its list; what a user's plug-in, agent or trainer records besides is read off the keys of its
mappings, without running it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from molt_core.fields import FIELDS, TEXTS


def known_fields(also: Iterable[Path] = ()) -> set[str]:
    """Every field that a run may record and that is no text; ``also``: a user's own Python files that record more."""
    return set(FIELDS).union(*(_keys(file) for file in also if file.is_file())) - TEXTS


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to write instead of ``name``."""
    close = difflib.get_close_matches(name, sorted(known), n=3)
    if close:
        return f"Did you mean {' or '.join(f'`{other}`' for other in close)}?"
    return "Name a field of metrics.jsonl, for example eval_reward_mean, wall_s or tokens_forward"


@cache
def _keys(file: Path) -> frozenset[str]:
    """String keys of the mappings that ``file`` writes down."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return frozenset()  # it cannot run either; whoever runs it says so
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found += node.keys
        elif isinstance(node, ast.Assign):
            found += [t.slice for t in node.targets if isinstance(t, ast.Subscript)]
    keys = (node.value for node in found if isinstance(node, ast.Constant))
    return frozenset(key for key in keys if isinstance(key, str) and key.isidentifier())
