"""What a job starts: the run's command with its places filled in, what it finds set, and its container around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cluster import Cluster
from harness.container import import_path, launch, needed_mounts
from harness.identity import ROOT
from harness.processes import MARK, own_environment
from harness.run_folder import RunFolder

INSIDE = ROOT / "harness" / "inside.py"


def command_line(
    folder: RunFolder, run: dict[str, Any], attempt: Path, scratch: str, cluster: Cluster
) -> list[str]:
    """What is started on this node: run.json's command, from inside its image where it has one."""
    if not run.get("image"):
        return own_command(folder, run, attempt, sys.executable)
    python = cluster.container.python
    own = own_command(folder, run, attempt, python)
    first = [python, "-P", str(INSIDE), str(folder.path), attempt.name]
    return inside(folder, run, attempt, scratch, cluster, [*first, *own])


def inside(
    folder: RunFolder,
    run: dict[str, Any],
    attempt: Path,
    scratch: str,
    cluster: Cluster,
    command: list[str],
    node: str | None = None,
) -> list[str]:
    """``command`` in the run's image, on this node; ``node``: its name, where it is not the allocation's first."""
    own = own_variables(folder, run, scratch, node)
    mounts = needed_mounts(folder.path.parents[2], run, scratch)
    cpus = run["resources"]["cpus_per_node"]
    return boxed(cluster, command, own, mounts, scratch, str(attempt), cpus, node)


def boxed(
    cluster: Cluster,
    command: list[str],
    own: Mapping[str, str],
    mounts: Sequence[str],
    scratch: str,
    workdir: str,
    cpus: int = 1,
    node: str | None = None,
) -> list[str]:
    """``command`` in the profile's container with a run's variables ``own``: of a run, and of what looks whether it can be."""
    # Of a home that is mounted all the same no packages, and caches where they may be written.
    variables = {**cluster.exports, **own, "PYTHONNOUSERSITE": "1", "HOME": scratch}
    return launch(
        cluster.container,
        command,
        mounts=mounts,
        workdir=workdir,
        variables=variables,
        passed=cluster.passed,
        cpus=cpus,
        node=node,
    )


def cluster_line(
    folder: RunFolder, run: dict[str, Any], scratch: str
) -> tuple[list[str], dict[str, str]]:
    """On several nodes: (what starts their Ray cluster and the run's command on it, its environment, which is the job's)."""
    own = {**own_environment(), MARK: folder.mark, "TMPDIR": scratch}
    return [sys.executable, "-m", "harness.ray_cluster", str(folder.path)], own


def own_command(folder: RunFolder, run: dict[str, Any], attempt: Path, python: str) -> list[str]:
    """run.json's command with this attempt's places filled in."""
    places = {
        "python": python,
        "run": str(folder.path),
        "scale": str(folder.path.parent),
        "attempt": str(int(attempt.name)),
    }
    return [part.format_map(places) for part in run["command"]]


def code_path(folder: RunFolder, run: dict[str, Any]) -> Path:
    """The snapshot that the run imports from; run.json has it relative, so that ``runs/`` can be moved."""
    return (folder.path / run["code_path"]).resolve()


def own_variables(
    folder: RunFolder, run: dict[str, Any], scratch: str, node: str | None = None
) -> dict[str, str]:
    """What a run's processes find set: what they import, the run's mark, where their stacks go.

    ``node``: where they are, if not on the allocation's first: process ids of two nodes may be the same, and a stack's file
    is named by one.
    """
    return {
        MARK: folder.mark,
        **program_variables(code_path(folder, run), run, scratch),
        "MOLT_STACKS": str(folder.attempts[-1] / "stacks" / (node or "")),
    }


def program_variables(code: Path, run: Mapping[str, Any], scratch: str) -> dict[str, str]:
    """The snapshot ``code`` first on the import path, then the run's own modules; ``run``: run.json."""
    modules = import_path(run) if run.get("image") else run.get("import_path", [])
    return {
        "PYTHONPATH": os.pathsep.join([str(code), str(code / "molt_core" / "_site"), *modules]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": scratch,
        "MOLT_CODE": str(code),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The job's own environment with ``variables`` over it, and its import path after theirs."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    path = [variables["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])]
    # Without PYTHONSAFEPATH: a user's program may start scripts that import what lies beside them.
    return {**own, **variables, "PYTHONPATH": os.pathsep.join(path)}
