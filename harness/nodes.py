"""Ask a compute node, before anything is queued: are paths, image, model and data there, and does the environment import?

A login node sees other file systems than a compute node, and other libraries. So a short job of its own (one processor, ten
minutes at most) looks at everything from where the runs will be, with the variables and in the container of a run. Only what a
node has said is a refusal. Where the job gets no place in time, or is itself preempted, cancelled or lost with its node,
nothing is known and nothing is refused: the answer says that it was not checked, and why.
"""

from __future__ import annotations

import json
import select
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster import Cluster
from harness.command import boxed, program_variables
from harness.container import needed_mounts
from harness.expand import Expansion, Run
from harness.identity import ROOT, TOOLS, take_snapshot
from harness.inputs import import_path
from harness.node_check import SCRATCH, answer_in
from harness.preflight import disk_needed_gb, packages
from harness.sbatch import small_script
from harness.scheduler import (
    ANSWER_S,
    Job,
    SlurmError,
    ask_slurm,
    look_up,
    outside_an_allocation,
)

PATIENCE_S = 180.0
"""How long a submit waits for the answer: a place in the queue, and imports from a cold file system."""
POLL_S = 1.0
TRIES = 2
"""How often a job is sent that others end before it has looked."""
TAKEN = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUED")
"""Ends that say nothing of what was looked for, after which another try may see it."""
STOPPED = ("CANCELLED", "TIMEOUT", "DEADLINE", "REVOKED")
"""The same, after which another try is a person's to ask for."""


@dataclass(frozen=True)
class Sight:
    """``problems``: what a node misses, one sentence each. ``unchecked``: why it could not be asked, "" where it was."""

    problems: tuple[str, ...] = ()
    unchecked: str = ""


def look(
    expansion: Expansion, runs: Sequence[Run], cluster: Cluster, patience_s: float = PATIENCE_S
) -> Sight:
    """What a node sees of what ``runs`` need. Raises SlurmError where sbatch refuses."""
    deadline = time.monotonic() + patience_s
    sight = Sight()
    for _ in range(TRIES):
        sight, again = _look(expansion, runs, cluster, deadline - time.monotonic())
        if not again or time.monotonic() >= deadline:
            break
    return sight


def _look(
    expansion: Expansion, runs: Sequence[Run], cluster: Cluster, patience_s: float
) -> tuple[Sight, bool]:
    """(what one job saw, whether it was taken away before it could)."""
    folder = expansion.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    code = take_snapshot(folder.parents[1] / ".code", code=TOOLS).path
    name = f"{folder.parent.name}-check-{uuid.uuid4().hex[:8]}"
    output = folder / f".{name}.log"
    given = shlex.quote(json.dumps(facts(expansion, runs, cluster, code)))
    command = f"exec {shlex.quote(sys.executable)} -m harness.node_check {given}"
    text = small_script(cluster, expansion.scale.resources, name, code, output, command)
    try:
        job = _work(text, name, patience_s)
        said = output.read_text() if output.exists() else ""
        answer = answer_in(said)
        if answer is not None:
            return Sight(tuple(answer)), False
        if job is None:
            return Sight(unchecked=f"no node answered within {patience_s:.0f} s"), False
        if job.state in (*TAKEN, *STOPPED) or job.lives:
            where = f" on {job.nodes}" if job.nodes else ""
            return Sight(
                unchecked=f"the job that looks ended {job.state}{where}"
            ), job.state in TAKEN
        words = said.strip().splitlines() or [f"it left no word: does a node see {folder}?"]
        return Sight((f"the job that looks at a node failed; {words[-1]}",)), False
    finally:
        output.unlink(missing_ok=True)


def facts(
    expansion: Expansion, runs: Sequence[Run], cluster: Cluster, code: Path = ROOT
) -> dict[str, Any]:
    """What ``harness/node_check.py`` is asked; ``code``: where the harness lies that asks. A run imports the snapshot."""
    inputs = [found for run in runs for found in run.inputs]
    data = [(f.key, place) for f in inputs for place in f.import_path or f.files]
    data = [*dict.fromkeys(data), ("the code's copy", str(expansion.snapshot.path.resolve()))]
    folder, box = expansion.folder.resolve(), cluster.container
    run = {"inputs": [f.record() for f in inputs], "import_path": import_path(inputs)}
    run["image"] = box.runtime != "none"
    variables = program_variables(expansion.snapshot.path.resolve(), run, SCRATCH)
    own = {
        "folder": str(folder),
        "disk_gb": disk_needed_gb(expansion),
        "passed": cluster.passed,
        "statements": _statements(expansion),
    }
    here = [("the environment of the submit", sys.executable), *data]
    if box.runtime == "none":
        return {**own, "places": here, "variables": variables}
    here += [("container.mounts", mount.partition(":")[0]) for mount in box.mounts]
    line = boxed(
        cluster,
        [box.python, "-P", str(code / "harness" / "node_check.py")],
        variables,
        needed_mounts(folder.parents[1], run, SCRATCH, code),
        SCRATCH,
        str(folder),
    )
    outside = {key: value for key, value in own.items() if key != "statements"}
    places = [("container.image", str(box.image)), *here]
    return {**outside, "places": places, "launch": line, "inside": {**own, "places": data}}


def _statements(expansion: Expansion) -> list[str]:
    """What must succeed in a run's Python: its packages, and what it names as package.module:Class."""
    configs = expansion.scale.configs.values()
    named = {name for config in configs for name in (config.task.agent, config.trainer.backend)}
    modules = {name.partition(":")[0] for name in named if ":" in name}
    found = [f"import {name}" for name in sorted(packages(expansion) | modules)]
    if expansion.scale.resources.device == "cuda":
        found.append("import torch; torch.empty(1, device='cuda')")
    return found


def _work(text: str, name: str, patience_s: float) -> Job | None:
    """Send a script and wait for its end: how Slurm says that it ended.

    None where that took too long, and then nothing of it is left in the queue. Raises SlurmError.
    """
    with outside_an_allocation():
        waiting = subprocess.Popen(
            ["sbatch", "--parsable", "--wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert waiting.stdin and waiting.stdout and waiting.stderr
    job_id = ""
    try:
        with suppress(BrokenPipeError):  # an sbatch that reads nothing says why below
            waiting.stdin.write(text)
            waiting.stdin.close()
        answers, _, _ = select.select([waiting.stdout], [], [], ANSWER_S)
        if not answers:
            raise SlurmError(f"sbatch: timed out after {ANSWER_S:.0f} s")
        job_id = waiting.stdout.readline().strip().partition(";")[0]
        if not job_id:
            raise SlurmError(waiting.stderr.read().strip() or "sbatch said nothing")
        waiting.wait(patience_s)
        return _end(job_id)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if waiting.poll() is None:
            with suppress(SlurmError):  # where Slurm does not answer, the job ends by its own limit
                ask_slurm("scancel", job_id or f"--name={name}")
            waiting.kill()
            waiting.wait()


def _end(job_id: str) -> Job:
    """How Slurm says that a job ended. It says COMPLETING for a moment first, and nothing of a job that it has forgotten."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        job = look_up([job_id], fresh=True).get(job_id, Job("UNKNOWN"))
        if job.state != "COMPLETING" or time.monotonic() >= deadline:
            return job
        time.sleep(POLL_S)
