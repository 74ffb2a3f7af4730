"""How long before the end of a job its run is told to save: from what steps and saves have taken here.

Told to stop, a run finishes the step in progress and the save in progress, then saves (``molt_core/loop.py``). So the lead is
the longer of the longest step and the longest save, another such save, and a margin: of every earlier attempt of this
experiment and scale on the same shape of resources, canaries too. A save's time is that of the whole of it, the part in the
background included, as the run wrote it into ``checkpoints/saves.jsonl``. The profile's ``warn_s`` is the least, and stands
in for a save that none has measured yet.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.experiment_file import Resources
from harness.requeue import MARGIN_S
from harness.run_folder import run_folders, tail_records

SHAPE = ("nodes", "device", "devices_per_node", "cpus_per_node")
"""What must be equal for the times of a run to say something of another's."""
SPARE_S = 20.0 + MARGIN_S
"""For the processes to end in once the save is whole, over several nodes their Ray cluster too, and for the requeue."""
LATEST = 200
"""How many of a run's last steps and saves are looked at."""


@dataclass(frozen=True)
class Lead:
    """Seconds, and where they come from in words."""

    seconds: int
    words: str


def lead(scale_folder: Path, resources: Resources, least_s: int, limit_s: int) -> Lead:
    """The lead for runs with ``resources``; never more than half of their job's time limit, which must hold a step as well."""
    step_s = save_s = 0.0
    for folder in run_folders(scale_folder):
        asked = folder.run["resources"]
        if any(asked.get(key) != getattr(resources, key) for key in SHAPE):
            continue
        saves = whole_records(folder.path / "checkpoints" / "saves.jsonl")
        steps = tail_records(folder.metrics, LATEST)
        step_s = max([step_s, *(record.get("wall_s", 0.0) for record in steps)])
        save_s = max([save_s, *(record["save_s"] for record in saves)])
    return longest(step_s, save_s, least_s, limit_s)


def whole_records(saves: Path) -> list[dict[str, Any]]:
    """Of the last saves those that were written whole: a line that a full disk has cut is no reason to refuse a submit."""
    found = []
    lines = saves.read_text(errors="replace").split("\n") if saves.exists() else []
    for line in [line for line in lines if line][-LATEST:]:
        with suppress(ValueError):
            record = json.loads(line)
            found += [record] if isinstance(record, dict) and "save_s" in record else []
    return found


def longest(step_s: float, save_s: float, least_s: int, limit_s: int) -> Lead:
    """Pure. ``step_s``, ``save_s``: the longest that were measured, 0 where none was."""
    save = save_s or least_s
    seconds = least_s
    words = "the profile's warn_s; no step was measured on this shape yet"
    if step_s:
        measured = f"longest step {step_s:.1f} s, "
        measured += f"longest save {save_s:.1f} s" if save_s else f"no save measured yet ({save} s)"
        seconds = math.ceil(max(step_s, save_s) + save + SPARE_S)
        words = f"{measured}, margin {SPARE_S:.0f} s"
        if seconds < least_s:
            seconds, words = least_s, f"the profile's warn_s; {words}"
    if seconds > limit_s // 2:
        words = f"half of the time limit, less than the {seconds} s of {words}"
        seconds = limit_s // 2
    return Lead(seconds, words)
