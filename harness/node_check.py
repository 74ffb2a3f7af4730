"""What a compute node sees:  python -m harness.node_check FACTS     (a job that a submit sends ahead: harness/nodes.py)

FACTS, in JSON: ``places`` that must be there, a ``folder`` that must be writable, ``statements`` of Python that must succeed;
or, in their stead, ``inside``, the same of a container, and its ``launch`` line. Prints what is wrong as one line of JSON. A
container is looked into by this same file, under its own Python: nothing but the standard library is used.
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


def problems(facts: dict[str, Any]) -> list[str]:
    """Everything that is wrong here, one sentence each; what is inside a container once it can be entered."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = [
        f"{key}: {place} is not there as {node} sees it; put it where compute nodes see it"
        for key, place in facts["places"]
        if not Path(place).exists()
    ]
    if not _writable(facts["folder"]):
        found.append(
            f"{facts['folder']} cannot be written on {node}; use --runs with a shared folder"
        )
    if "inside" in facts:
        return [*found, *([] if found else _inside(facts["launch"], facts["inside"], node))]
    for statement in facts["statements"]:
        asked = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
        if asked.returncode != 0:
            said = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
            found.append(f"`{statement}` fails on {node} with {sys.executable}: {said}")
    return found


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
