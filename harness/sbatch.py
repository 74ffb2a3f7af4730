"""What Slurm is asked for, as pure functions: runs -> arrays -> the text of their batch scripts.

One array for each kind of run and shape of resources, with the arms interleaved; a task is one run. What every task needs must
succeed (afterok); what only some need must end (afterany), and a task whose own need then failed is BLOCKED by its job, alone.

The text is submitit's, with the directives of the cluster's profile over it. It ends in ``exec``: the job is one process, so
that the signals which Slurm sends to a batch script (``--signal=B:``) reach the job and not a shell that waits for it.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster import Cluster
from harness.container import launch
from harness.expand import Run
from harness.experiment_file import Resources
from harness.identity import digest
from harness.run_folder import RunFolder

SIGNAL = "USR2"
"""Slurm's warning before the time limit and before preemption."""


@dataclass(frozen=True)
class Task:
    """What Slurm has to know of a run, from its folder; ``expand.Run`` has it under the same names."""

    name: str
    kind: str
    needs: tuple[str, ...]
    resources: Resources

    @classmethod
    def of(cls, folder: RunFolder) -> Task:
        run = folder.run
        asked = {k: v for k, v in run["resources"].items() if k in Resources.model_fields}
        needs = tuple(run.get("needs", ()))
        return cls(folder.name, run["kind"], needs, Resources.model_validate(asked))


@dataclass(frozen=True)
class Array:
    """Runs that are submitted together: of one kind, with equal resources."""

    runs: tuple[Run | Task, ...]
    resources: Resources
    parallel: int = 256
    """How many of them may work at once."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What any of the runs needs."""
        return tuple(dict.fromkeys(need for run in self.runs for need in run.needs))

    def all_need(self, name: str) -> bool:
        return all(name in run.needs for run in self.runs)


def arrays(runs: Iterable[Run | Task], cluster: Cluster, max_size: int = 1001) -> list[Array]:
    """Runs of one kind and equal resources together, in the order given: what is needed comes before what needs it.

    ``max_size`` is Slurm's MaxArraySize. It caps an array's highest index plus one, so more runs are several arrays, which
    share the bound on how many work at once.
    """
    grouped: dict[tuple, list[Run | Task]] = {}
    for run in runs:
        grouped.setdefault((run.kind, run.resources), []).append(run)
    found = []
    for (_, resources), group in grouped.items():
        pieces = [group[start : start + max_size] for start in range(0, len(group), max_size)]
        for piece in pieces:
            parallel = max(1, cluster.max_running * len(piece) // len(group))
            found.append(Array(tuple(piece), resources, min(parallel, len(piece))))
    return found


def job_name(array: Array, folder: Path, before: Mapping[str, Any]) -> str:
    """A name that no other submission has, and that the same submission has when it is tried again.

    ``folder``: of experiment and scale; ``before``: run -> what was submitted for it earlier. So a job whose id was lost
    with a time-out of sbatch is found again by its name.
    """
    names = [run.name for run in array.runs]
    print_ = digest([str(folder), names, [before.get(name) for name in names]])
    return f"{folder.parent.name}-{folder.name}-{array.runs[0].kind}-{print_[:8]}"


def parameters(
    array: Array,
    cluster: Cluster,
    name: str,
    after: Mapping[str, str],
    code: Path,
    exclude: Sequence[str] = (),
) -> dict[str, Any]:
    """submitit's parameters. ``after``: run -> job id of what must come first; ``code``: where the job imports this harness
    from; ``exclude``: nodes to avoid.

    The batch script runs on the first node alone (no srun): a run starts its own processes on the others.
    """
    resources = array.resources
    chosen: dict[str, Any] = {
        "job_name": name,
        "nodes": resources.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": resources.cpus_per_node,
        "time": -(-cluster.job_s(resources.time_limit_s) // 60),
        "array_parallelism": array.parallel,
        "use_srun": False,
        "stderr_to_stdout": True,
        "setup": setup_lines(cluster, code, resources.cpus_per_node),
    }
    chosen |= where(cluster)
    more: dict[str, Any] = {"signal": f"B:{SIGNAL}@{cluster.warn_s}", "requeue": True}
    if resources.device == "cuda":
        more |= devices_asked(cluster, resources)
        if cluster.exclusive:
            chosen |= {"exclusive": True, "mem": "0"}
    if after:
        succeed = [job for need, job in after.items() if array.all_need(need)]
        end = [job for need, job in after.items() if not array.all_need(need)]
        asked = [":".join(["afterok", *succeed])] * bool(succeed)
        asked += [":".join(["afterany", *end])] * bool(end)
        chosen["dependency"] = ",".join(asked)
        more["kill-on-invalid-dep"] = "yes"
    more |= cluster.directives
    for key in cluster.sbatch:  # ours has underscores there, and of two lines sbatch takes the last
        chosen.pop(key.replace("-", "_"), None)
    if avoided := cluster.avoiding(exclude):
        more["exclude"] = avoided
    return {**chosen, "additional_parameters": more}


def where(cluster: Cluster) -> dict[str, str]:
    """The directives that say where and as whom."""
    given = {"partition": cluster.partition, "account": cluster.account, "qos": cluster.qos}
    return {key: value for key, value in given.items() if value is not None}


def devices_asked(cluster: Cluster, resources: Resources) -> dict[str, str]:
    """The option by which sbatch and srun are asked for a node's GPUs."""
    count = resources.devices_per_node
    asked = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return {"gpus-per-node": asked} if cluster.gpus != "gres" else {"gres": f"gpu:{asked}"}


def small_script(
    cluster: Cluster, resources: Resources, name: str, code: Path, output: Path, command: str
) -> str:
    """The batch script of one short ``command`` on one node of those that ``resources`` would run on, beside other jobs."""
    asked: dict[str, Any] = {"job-name": name, "nodes": 1, "ntasks": 1, "time": 10}
    asked |= {"output": output, "no-requeue": True, **where(cluster)}
    if resources.device == "cuda":
        asked |= devices_asked(cluster, resources.model_copy(update={"devices_per_node": 1}))
    asked = {key: value for key, value in asked.items() if key not in cluster.sbatch}
    theirs = {key: value for key, value in cluster.directives.items() if key != "requeue"}
    given = sorted({**asked, **theirs}.items())
    lines = [f"#SBATCH --{key}" + ("" if value is True else f"={value}") for key, value in given]
    return "\n".join(["#!/bin/bash", *lines, *setup_lines(cluster, code, 1), command, ""])


def setup_lines(cluster: Cluster, code: Path, cpus: int) -> list[str]:
    """Shell before the job: the profile's lines and variables, and where this harness is imported from."""
    # Without the second, `python -m` would import from the folder that sbatch was called in before anything else.
    exports = {**cluster.exports, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(code)}
    lines = [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
    lines[-1] += '"${PYTHONPATH:+:$PYTHONPATH}"'
    if cluster.container.runtime != "none":
        shape = {"workdir": "ATTEMPT", "passed": cluster.passed, "cpus": cpus}
        shown = shlex.join(launch(cluster.container, ["COMMAND"], **shape))
        lines.append(f"# The job starts a run's command by: {shown}")
    # A preemption may come before Python has imported what hears it, and would kill the job without a word.
    return ["trap '' USR2", *cluster.setup, *lines]


def script(
    array: Array,
    cluster: Cluster,
    name: str,
    after: Mapping[str, str],
    code: Path,
    folder: Path,
    exclude: Sequence[str] = (),
) -> str:
    """The batch script of ``array``; its logs and pickles lie in ``folder``."""
    from submitit.slurm.slurm import _make_sbatch_string  # a second to import, for submits only

    text = _make_sbatch_string(
        command=f"exec {shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}",
        folder=folder,
        map_count=len(array.runs),
        **parameters(array, cluster, name, after, code, exclude),
    )
    removed = tuple(f"#SBATCH --{key}" for key in cluster.sbatch if key not in cluster.directives)
    lines = [line for line in text.splitlines() if not _is_directive(line, removed)]
    return "\n".join(lines).rstrip() + "\n"


def _is_directive(line: str, starts: tuple[str, ...]) -> bool:
    return line.partition("=")[0] in starts
