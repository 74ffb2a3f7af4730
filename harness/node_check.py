"""What a compute node sees:  python -m harness.node_check FACTS     (a job that a submit sends ahead: harness/nodes.py)

FACTS, in JSON: ``places`` that must be there, a ``folder`` that must be writable, ``disk_gb`` that must be free there and in
the node's scratch, variables ``passed`` on that must be set, and ``statements`` of Python that must succeed with a run's
``variables``; and, for a container, ``inside``, the same of it, and its ``launch`` line. Prints what is wrong as one line of
JSON. A container is looked into by this same file, under its own Python: nothing but the standard library is used.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MARK = "WHAT A NODE SEES "
"""Begins the line that counts: programs and sites print lines of their own."""
SCRATCH = "{scratch}"
"""Stands in FACTS for a folder of the node's own, as a run has one."""


def problems(facts: dict[str, Any]) -> list[str]:
    """Everything that is wrong here, one sentence each; what is inside a container once it can be entered."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = [
        f"{key}: {place} is not there as {node} sees it; put it where compute nodes see it"
        for key, place in facts["places"]
        if not Path(place).exists()
    ]
    found += [
        f"environment.{name}: it is not set in a job on {node}; `export` of the profile's sbatch keeps it out"
        for name in facts["passed"]
        if name not in os.environ
    ]
    if not _writable(facts["folder"]):
        return [
            *found,
            f"{facts['folder']} cannot be written on {node}; use --runs with a shared folder",
        ]
    scratch = tempfile.mkdtemp(prefix="m")  # as a run's own: harness/job.py
    try:
        for place, way_out in (
            (facts["folder"], "use --runs"),
            (scratch, "set TMPDIR in the profile"),
        ):
            free = shutil.disk_usage(place).free / 1e9
            if free < facts["disk_gb"]:
                found.append(
                    f"{place} has {free:.1f} GB free on {node} and {facts['disk_gb']:.1f} are needed; make room, or {way_out}"
                )
        if "inside" in facts:
            launch = [part.replace(SCRATCH, scratch) for part in facts["launch"]]
            found += [] if found else _inside(launch, facts["inside"], node)
        variables = {k: v.replace(SCRATCH, scratch) for k, v in facts.get("variables", {}).items()}
        for statement in facts.get("statements", ()):
            said = _refused(statement, variables, facts["folder"])
            if said is not None:
                found.append(f"`{statement}` fails on {node} with {sys.executable}: {said}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _refused(statement: str, variables: dict[str, str], folder: str) -> str | None:
    """Why a statement fails where a run would make it; None where it succeeds."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    paths = filter(None, [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
    environment = {**own, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", statement]
    asked = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if asked.returncode == 0:
        return None
    return (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]


def _writable(folder: str) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _inside(launch: list[str], facts: dict[str, Any], node: str) -> list[str]:
    if shutil.which(launch[0]) is None:
        return [
            f"container.runtime: there is no {launch[0]} on {node}; mend the profile, or its `setup`"
        ]
    asked = subprocess.run([*launch, json.dumps(facts)], capture_output=True, text=True)
    answer = answer_in(asked.stdout)
    if answer is None:
        said = (asked.stderr or asked.stdout).strip().splitlines() or ["no word"]
        return [f"the container cannot be entered on {node}: {said[-1]}"]
    return [f"in the container: {sentence}" for sentence in answer]


def answer_in(output: str) -> list[str] | None:
    """What the check found, of all that its job printed; None where it did not get so far."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else None


if __name__ == "__main__":
    print(MARK + json.dumps(problems(json.loads(sys.argv[1]))), flush=True)
