"""Ask a compute node, before anything is queued: are paths, image, model and data there, and does the environment import?

A login node sees other file systems than a compute node, and other libraries. So a short job of its own (one processor, ten
minutes at most) looks at everything from where the runs will be. Where it gets no place in time, nothing is known and
nothing is refused: the answer says that it was not checked.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster import Cluster
from harness.container import launch, needed_mounts
from harness.expand import Expansion, Run
from harness.identity import ROOT, TOOLS, take_snapshot
from harness.inputs import import_path
from harness.node_check import answer_in
from harness.preflight import packages
from harness.sbatch import small_script
from harness.scheduler import ANSWER_S, SlurmError, ask_slurm, outside_an_allocation

PATIENCE_S = 180.0
"""How long a submit waits for the answer: a place in the queue, and imports from a cold file system."""


@dataclass(frozen=True)
class Sight:
    """``problems``: what a node misses, one sentence each. ``unchecked``: why it could not be asked, "" where it was."""

    problems: tuple[str, ...] = ()
    unchecked: str = ""


def look(
    expansion: Expansion, runs: Sequence[Run], cluster: Cluster, patience_s: float = PATIENCE_S
) -> Sight:
    """What a node sees of what ``runs`` need. Raises SlurmError where sbatch refuses."""
    folder = expansion.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    code = take_snapshot(folder.parents[1] / ".code", code=TOOLS).path
    output, name = folder / f"node-check-{uuid.uuid4().hex[:8]}.log", f"{folder.parent.name}-check"
    given = shlex.quote(json.dumps(facts(expansion, runs, cluster, code)))
    command = f"exec {shlex.quote(sys.executable)} -m harness.node_check {given}"
    text = small_script(cluster, expansion.scale.resources, name, code, output, command)
    try:
        if not _work(text, patience_s):
            return Sight(unchecked=f"no node answered within {patience_s:.0f} s")
        answer = answer_in(output.read_text()) if output.exists() else None
        if answer is None:
            said = output.read_text().strip().splitlines() if output.exists() else []
            words = said[-1] if said else f"it left no word: does a node see {folder}?"
            return Sight((f"the job that looks at a node failed; {words}",))
        return Sight(tuple(answer))
    finally:
        output.unlink(missing_ok=True)


def facts(
    expansion: Expansion, runs: Sequence[Run], cluster: Cluster, code: Path = ROOT
) -> dict[str, Any]:
    """What ``harness/node_check.py`` is asked."""
    inputs = [found for run in runs for found in run.inputs]
    data = [(f.key, place) for f in inputs for place in f.import_path or f.files]
    data = [*dict.fromkeys(data), ("the code's copy", str(code))]
    folder, box = expansion.folder.resolve(), cluster.container
    statements = [f"import {package}" for package in sorted(packages(expansion))]
    if expansion.scale.resources.device == "cuda":
        statements.append("import torch; torch.empty(1, device='cuda')")
    own = {"folder": str(folder), "statements": statements}
    here = [("the environment of the submit", sys.executable), *data]
    if box.runtime == "none":
        return {**own, "places": here}
    here += [("container.mounts", mount.partition(":")[0]) for mount in box.mounts]
    run = {"inputs": [f.record() for f in inputs], "import_path": import_path(inputs)}
    line = launch(
        box,
        [box.python, "-P", str(code / "harness" / "node_check.py")],
        mounts=needed_mounts(folder.parents[1], run, str(folder), code),
        workdir=str(folder),
    )
    return {
        "folder": str(folder),
        "places": [("container.image", str(box.image)), *here],
        "launch": line,
        "inside": {**own, "places": data},
    }


def _work(text: str, patience_s: float) -> bool:
    """Send a script and wait for its end; False where that took too long, and then nothing of it is left in the queue."""
    with outside_an_allocation():
        job = subprocess.Popen(
            ["sbatch", "--parsable", "--wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert job.stdin is not None and job.stdout is not None and job.stderr is not None
    job.stdin.write(text)
    job.stdin.close()
    job_id = job.stdout.readline().strip().partition(";")[0]
    if not job_id:
        raise SlurmError(job.stderr.read().strip() or "sbatch said nothing")
    try:
        job.wait(patience_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        if job.poll() is None:
            ask_slurm("scancel", job_id)
            job.wait(ANSWER_S)
