"""Submit runs to Slurm through submitit: one job array for each kind of run and shape of resources, with the arms interleaved.

The task of an array is one run. It starts ``python -m harness.job``, which does on a node what it does on a laptop. What every
task needs is a dependency of Slurm's (afterok; a job whose dependency failed is cancelled instead of waiting for ever); what
some need is waited for (afterany), and a task whose own need then failed is BLOCKED by its job, alone.
Job ids are kept in ``slurm.json``, so that a second submit leaves queued and running jobs alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.expand import Expansion, Run
from harness.processes import own_environment
from harness.run_folder import RunFolder, read_json, write_json
from harness.spec import Resources

REFRESH_S = 20.0
"""A scheduler is asked no more often than this, however often one looks."""
_asked: dict[str, tuple[float, set[str]]] = {}


class SlurmError(RuntimeError):
    """A command of Slurm failed; the message is Slurm's."""


@dataclass(frozen=True)
class Array:
    """Runs that are submitted together: of one kind, with equal resources."""

    runs: tuple[Run, ...]
    resources: Resources

    @property
    def needs(self) -> tuple[str, ...]:
        """What any of the runs needs."""
        return tuple(dict.fromkeys(need for run in self.runs for need in run.needs))

    def all_need(self, name: str) -> bool:
        return all(name in run.needs for run in self.runs)


def arrays(runs: Iterable[Run]) -> list[Array]:
    """Runs of one kind and equal resources together, in the order given: what is needed comes before what needs it."""
    grouped: dict[tuple, list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.kind, run.resources), []).append(run)
    return [Array(tuple(group), resources) for (_, resources), group in grouped.items()]


def parameters(array: Array, name: str, ids: Mapping[str, str]) -> dict[str, Any]:
    """submitit's parameters of an array; ``ids``: jobs of the runs that it waits for.

    The batch script runs on the first node alone (no srun): a run starts its own processes on the others.
    """
    resources = array.resources
    minutes = -(-resources.time_limit_s // 60)
    chosen: dict[str, Any] = {
        "job_name": name,
        "nodes": resources.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": resources.cpus_per_node,
        "time": minutes,
        "use_srun": False,
        "stderr_to_stdout": True,
    }
    if resources.device == "cuda":
        chosen |= {"gpus_per_node": resources.devices_per_node, "exclusive": True}
    if ids:
        succeed = [job for run, job in ids.items() if array.all_need(run)]
        end = [job for run, job in ids.items() if not array.all_need(run)]
        asked = [":".join(["afterok", *succeed])] * bool(succeed)
        asked += [":".join(["afterany", *end])] * bool(end)
        chosen["dependency"] = ",".join(asked)
        chosen["additional_parameters"] = {"kill-on-invalid-dep": "yes"}
    return chosen


def submit_arrays(expansion: Expansion, names: list[str]) -> dict[str, str]:
    """Submit ``names``, which are not live; returns run name -> job id and keeps it in slurm.json.

    Raises SlurmError where sbatch refuses; the arrays before it stay submitted, and the next submit goes on.
    """
    import submitit

    folder = expansion.folder.resolve()
    ids = job_ids(folder)
    for array in arrays(run for run in expansion.runs if run.name in names):
        pending = [need for need in array.needs if RunFolder(folder / need).done is None]
        if absent := [need for need in pending if need not in ids]:
            raise SlurmError(
                f"{absent[0]} is needed first and is neither done nor with Slurm; submit with --retry, or let the queue that "
                "works it end"
            )
        name = f"{expansion.experiment.name}-{expansion.scale.name}-{array.runs[0].kind}"
        executor = submitit.SlurmExecutor(folder=folder / "slurm", python=sys.executable)
        executor.update_parameters(**parameters(array, name, {n: ids[n] for n in pending}))
        with outside_an_allocation():
            try:
                jobs = executor.map_array(work_run, [str(folder / run.name) for run in array.runs])
            except submitit.core.utils.FailedJobError as error:
                raise SlurmError(f"sbatch: {str(error).strip()}") from error
        ids |= {run.name: job.job_id for run, job in zip(array.runs, jobs)}
        write_json(folder / "slurm.json", ids)  # after each array: a later failure loses none
    return ids


@contextmanager
def outside_an_allocation() -> Iterator[None]:
    """No variable of an allocation that this may run in, but the one that says where the cluster's configuration is."""
    from submitit.helpers import clean_env

    where = os.environ.get("SLURM_CONF")
    with clean_env():
        if where is not None:
            os.environ["SLURM_CONF"] = where
        yield


def work_run(run_dir: str) -> None:
    """One task of an array, on its first node. Raises where the run is not done, so that Slurm calls the job failed."""
    job = [sys.executable, "-m", "harness.job", run_dir]
    code = subprocess.run(job, env=own_environment()).returncode
    if code != 0:
        raise RuntimeError(
            f"{Path(run_dir).name} is not done (exit code {code}); see its attempts/"
        )


def job_ids(scale_folder: Path) -> dict[str, str]:
    """Run name -> id of the job that was last submitted for it."""
    return read_json(scale_folder / "slurm.json") or {}


def live(scale_folder: Path, fresh: bool = False) -> set[str]:
    """Names of runs whose job Slurm still has (pending, running, ...). Raises SlurmError, and then nothing is known.

    One squeue for all jobs, asked again after REFRESH_S at the earliest unless ``fresh``.
    """
    ids = job_ids(scale_folder)
    if not ids:
        return set()
    asked_at, known = _asked.get("squeue", (-math.inf, set()))
    if fresh or time.monotonic() - asked_at > REFRESH_S:
        command = ["squeue", "--me", "--array", "--noheader", "--format=%i"]
        listed = subprocess.run(command, capture_output=True, text=True)
        if listed.returncode != 0:
            raise SlurmError(f"squeue: {listed.stderr.strip()}")
        known = set(listed.stdout.split())
        _asked["squeue"] = (time.monotonic(), known)
    return {name for name, job_id in ids.items() if job_id in known}


def cancel_jobs(scale_folder: Path, names: Iterable[str]) -> list[str]:
    """One scancel for all of ``names`` that live; returns them."""
    ids, alive = job_ids(scale_folder), live(scale_folder, fresh=True)
    stopped = [name for name in names if name in alive]
    if stopped:
        command = ["scancel", *(ids[name] for name in stopped)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SlurmError(f"scancel: {done.stderr.strip()}")
    return stopped
