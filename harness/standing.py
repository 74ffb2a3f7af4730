"""How a run stands with Slurm, where its folder alone does not say: it waits, works, ended without a word, or nobody knows.

Believed in this order: slurmctld (squeue), the database (sacct) for what slurmctld has forgotten, the run's own heartbeat. A
scheduler that does not answer makes a run UNKNOWN and never dead; so does a job that Slurm no longer knows while the run's
heart has beaten lately. A job that Slurm calls COMPLETED has ``RECORD_S`` for its word to arrive over the file system; then it
ended without one, which is an accident.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from harness.causes import from_slurm
from harness.requeue import job_of
from harness.run_folder import RunFolder, read_json
from harness.scheduler import REFRESH_S, Job, SlurmError
from harness.slurm import job_ids, jobs

FRESH_S = 300.0
"""A heartbeat younger than this is a sign of life."""
RECORD_S = 60.0
"""How long after a job's end what it wrote may take to be seen here: a file server's clients keep what they know as long."""
WAITS_FOR = {
    "Priority": "other jobs come first",
    "Resources": "it is next, as soon as nodes are free",
    "Dependency": "what it needs has not ended",
    "DependencyNeverSatisfied": "what it needs has failed",
    "BeginTime": "Slurm lets a requeued job rest for a while",
    "JobArrayTaskLimit": "as many of this submit work as may at once",
    "PartitionTimeLimit": "its time limit is over the partition's",
    "BadConstraints": "no node is left that it may use",
    "JobHeldUser": "held; `scontrol release` lets it go",
    "JobHeldAdmin": "held by the cluster's people",
    "launch failed requeued held": "its start failed and Slurm holds it; `scontrol release` lets it go",
}
"""Slurm's word for why a job waits -> ours; others are shown as they are."""


@dataclass(frozen=True)
class Standing:
    """State and sentence, and the job behind them."""

    state: str
    why: str
    job: str
    nodes: str = ""


_down: dict[Path, tuple[float, str]] = {}


def standings(scale_folder: Path, fresh: bool = False) -> dict[str, Standing]:
    """Run name -> how its last job stands, for every run that was sent to Slurm and whose folder leaves it open."""
    sent = job_ids(scale_folder)
    ids = {name: job for name, job in sent.items() if RunFolder(scale_folder / name).done is None}
    if not ids:  # then nobody need be asked, who may not answer
        return {}
    failed_at, down = _down.get(scale_folder, (-math.inf, ""))
    known: dict[str, Job] = {}
    if fresh or time.monotonic() - failed_at > REFRESH_S:
        try:
            known, down = jobs(scale_folder, fresh), ""
        except SlurmError as error:
            down = str(error)
            _down[scale_folder] = (time.monotonic(), down)
    found = {}
    for name, job_id in ids.items():
        stands = standing(RunFolder(scale_folder / name), job_id, known.get(name), down)
        if stands is not None:
            found[name] = stands
    return found


def standing(folder: RunFolder, job_id: str, job: Job | None, down: str = "") -> Standing | None:
    """What ``job`` says of the run; None where the folder's own account stands.

    ``down``: why the scheduler could not be asked, "" where it answered and does not know the job.
    """
    if not (folder.path / "run.json").exists() or folder.done is not None:
        return None
    own = _own_account(folder, job_id)
    if job is not None and job.waits:
        before = f", after {own['reason']}" if own else ""
        return Standing("WAITING", _waits(job.reason) + before, job_id)
    if job is not None and job.lives:
        state = "RUNNING" if job.works else "UNKNOWN"
        ended = f"its attempt ended {own['reason']}; " if own else ""
        return Standing(state, f"{ended}Slurm says {job.state}", job_id, job.nodes)
    if own is not None and not own.get("requeued"):
        return None
    if job is not None:
        return _ended(folder, job_id, job)
    return _silent(folder, job_id, down)


def _own_account(folder: RunFolder, job_id: str) -> dict | None:
    """end.json of the last attempt, where this job has made it."""
    attempts = folder.attempts
    start = read_json(attempts[-1] / "start.json") if attempts else None
    return folder.end if start is not None and job_of(start) == job_id else None


def _waits(reason: str) -> str:
    ours = WAITS_FOR.get(reason)
    return f"{ours} ({reason})" if ours else reason or "it is in the queue"


def _ended(folder: RunFolder, job_id: str, job: Job) -> Standing:
    if job.state == "COMPLETED":
        if job.ended is None or time.time() - job.ended < RECORD_S:
            why = "Slurm calls its job COMPLETED and there is no done.json (yet)"
            return Standing("UNKNOWN", why, job_id, job.nodes)
        where = f" on {job.nodes}" if job.nodes else ""
        why = (
            f"its job ended without a record{where}: COMPLETED, says Slurm, and nothing was written"
        )
        return Standing("INFRA", why, job_id, job.nodes)
    if job.state == "CANCELLED" and not job.nodes and (blocked := _blocked(folder, job_id)):
        return blocked
    return Standing(*from_slurm(job.state, job.nodes, job.reason), job_id, job.nodes)


def _blocked(folder: RunFolder, job_id: str) -> Standing | None:
    """BLOCKED where a run that this one needs has ended otherwise than well."""
    for need in folder.needs:
        if need.done is None and need.end is not None:
            reason = need.end["reason"]
            return Standing("BLOCKED", f"needs {need.name}, which ended {reason}", job_id)
    return None


def _silent(folder: RunFolder, job_id: str, down: str) -> Standing | None:
    """Nobody speaks of the job: its heartbeat decides whether that means anything."""
    beat = (folder.heartbeat or {}).get("time_unix")
    age = time.time() - beat if beat is not None else math.inf
    last = f"last heartbeat {age:.0f} s ago" if beat is not None else "no heartbeat"
    if down:
        return Standing("UNKNOWN", f"the scheduler does not answer: {down}; {last}", job_id)
    if age < FRESH_S:
        return Standing("UNKNOWN", f"Slurm does not know job {job_id}, but {last}", job_id)
    if folder.attempts:  # and how the last ended stands
        return None
    # Slurm drops a task that is cancelled before its array has started it, and leaves no record of it.
    why = f"its job {job_id} was cancelled while it waited: Slurm knows it no longer, and it never started"
    return _blocked(folder, job_id) or Standing("KILLED", why, job_id)
