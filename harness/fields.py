"""What a run's record may hold, so that an endpoint on a field that nobody records is refused before the runs are paid for.

The names are read off the code that records them (the keys of its mappings, not run), so this list cannot fall behind it; a
user's plug-in, agent or trainer is read the same way.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from harness.identity import ROOT

RECORDERS = (
    *("metrics.py", "loop.py", "train/objective.py"),
    *("algo/losses.py", "algo/importance.py"),
)
"""What writes or names a field of ``metrics.jsonl``, below molt_core/."""
PROMISED = frozenset(
    (
        *("step", "attempt", "time_unix", "optimizer_steps", "wall_s", "devices"),
        *("t_wait_s", "t_forward_backward_s", "t_optimizer_s", "t_refit_s", "t_eval_s"),
        *("t_checkpoint_s", "t_overlap_s", "policy_version", "lag_mean", "lag_max"),
        *("tokens_generated", "tokens_trained", "tokens_in_flight", "tokens_dropped"),
        *("groups_generated", "groups_trained", "groups_in_flight", "groups_dropped"),
        *("tokens_forward", "tokens_across_refit", "kept_fraction", "tokens_router_tied"),
        *("mismatch_mean", "mismatch_p99", "mismatch_max", "mismatch_tokens"),
        *("grad_norm", "loss", "entropy", "kl", "clip_fraction"),
        *("reward_mean", "reward_std", "response_tokens_mean", "truncated_fraction"),
        "eval_reward_mean",
    )
)
"""Fields that every system records, ours and others alike."""
TEXTS = frozenset(("phase", "prompts_fingerprint", "trained_fingerprint"))
"""Fields that are no numbers."""


def known_fields(also: Iterable[Path] = ()) -> set[str]:
    """Every field that a run may record; ``also``: a user's own Python files that record more."""
    files = [file for pattern in RECORDERS for file in sorted((ROOT / "molt_core").glob(pattern))]
    return set(PROMISED).union(*(_keys(f) for f in (*files, *also) if f.is_file())) - TEXTS


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
