"""How many processes of this very job the kernel has killed for memory, from the job's own control group.

The machine's count (/proc/vmstat) is of all jobs on a node: a neighbour's kill would rename another's end. Slurm puts a job's
processes below a group ``job_<number>``. Under v2 ``memory.events`` of that group counts all below it; under v1 each group
counts its own in ``memory.oom_control``, so they are added up. Where there is no such group (no Slurm, or one without
task/cgroup) nothing is known, and nothing is guessed: then an error's own words must say it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

OWN, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")


def kills_in_job(own: Path = OWN, mounts: Path = MOUNTS) -> int | None:
    """The count since the job's group was made; None where nothing is known. ``own``, ``mounts``: files of the kernel's."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    for version, folder in _groups(own, mounts):
        parts = folder.parts
        if f"job_{job}" not in parts:
            continue
        group = Path(*parts[: parts.index(f"job_{job}") + 1])
        if version == 2:
            return _count(group / "memory.events")
        found = [_count(file) for file in group.rglob("memory.oom_control")]
        return sum(n for n in found if n is not None) if found else None
    return None


def _groups(own: Path, mounts: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's group of memory, as seen through each mount of such a hierarchy."""
    paths = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            paths[2 if controllers == "" else 1] = Path(path)
    for line in mounts.read_text().splitlines():
        left, _, right = line.partition(" - ")
        root, place = left.split()[3:5]
        kind, _, options = right.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        memory = version == 2 or "memory" in options.split(",")
        if memory and version in paths and paths[version].is_relative_to(root):
            yield version, Path(place) / paths[version].relative_to(root)


def _count(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:  # the group's step has ended meanwhile
        return None
    return int(found.group(1)) if found else None
