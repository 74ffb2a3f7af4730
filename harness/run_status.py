"""The state of a run at one moment, read from its folder, the queue and Slurm; reading changes nothing.

A run is RUNNING while a job holds its lock, DONE when done.json exists, WAITING while a queue will start it; every other word
is how its last attempt ended (``harness/causes.py``). Where a run was sent to Slurm and its folder leaves it open, Slurm is
asked, once for all (``harness/standing.py``); what nobody can tell is UNKNOWN.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.cores import taken_by_others
from harness.requeue import job_of
from harness.run_folder import (
    RunFolder,
    holder,
    is_held,
    read_json,
    run_folders,
    tail_records,
)
from harness.standing import Standing, standings

RATE_WINDOW = 20
"""Steps over which the time left is estimated."""
CROWDED = "runs of other queues hold this machine's cores; it is started when they end"


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment. Seconds are wall clock; None where a value does not exist (yet)."""

    run: str
    kind: str
    system: str
    seed: int
    state: str
    phase: str | None = None
    step: int | None = None
    steps: int | None = None
    reward_mean: float | None = None
    elapsed_s: float | None = None
    left_s: float | None = None
    attempt: int = 0
    node: str | None = None
    job: str | None = None
    why: str = ""


def queue_lock(scale_folder: Path) -> Path:
    return scale_folder / "queue.lock"


def read_status(
    folder: RunFolder, waiting: bool = False, standing: Standing | None = None
) -> RunStatus:
    """The status of one run; ``waiting``: a queue that is alive means to start it; ``standing``: what Slurm says of it."""
    run = folder.run
    attempts = folder.attempts
    beat = folder.heartbeat or {}
    about = dict(run=folder.name, kind=run["kind"], system=run["system"], seed=run["seed"])
    if run["kind"] in ("train", "canary"):
        about["steps"] = run["config"]["loop"]["steps"]
    if attempts:
        about["attempt"] = int(attempts[-1].name)
    start = (read_json(attempts[-1] / "start.json") if attempts else None) or {}
    about |= {"node": start.get("slurmd_nodename") or start.get("host"), "job": job_of(start)}
    done = folder.done
    if done is not None:
        end = folder.end or {}
        summary = done.get("summary", {})
        return RunStatus(
            **about,
            state="DONE",
            step=about.get("steps"),
            reward_mean=summary.get("reward_mean_last10"),
            elapsed_s=end.get("duration_s") or _until_done(start, done),
        )
    if folder.is_working():
        current = bool(start) and beat.get("time_unix", 0) >= start["time"]
        return RunStatus(
            **about,
            state="RUNNING",
            phase=beat["phase"] if current else "starting",
            step=beat["step"] if current else 0,
            reward_mean=beat.get("reward_mean") if current else None,
            elapsed_s=time.time() - start["time"] if start else None,
            left_s=_left_s(folder, about, beat) if current else None,
        )
    if waiting:
        return RunStatus(**about, state="WAITING")
    if standing is not None:
        about |= {"job": standing.job, "node": standing.nodes or about["node"]}
        phase = "starting" if standing.state == "RUNNING" else beat.get("phase")
        return RunStatus(
            **about, state=standing.state, phase=phase, step=beat.get("step"), why=standing.why
        )
    if not attempts:
        return RunStatus(**about, state="PLANNED")
    end = folder.end
    if end is None:
        state, why = "KILLED", "its job was killed without a word"
    elif end["state"] == "DONE":
        state, why = "KILLED", "its done.json is gone"
    else:
        state = end["state"]
        why = end["reason"].removeprefix(f"{state}: ").removeprefix(state)
    return RunStatus(
        **about,
        state=state,
        phase=beat.get("phase"),
        step=beat.get("step"),
        reward_mean=beat.get("reward_mean"),
        elapsed_s=end["duration_s"] if end else None,
        why=why,
    )


def _until_done(start: dict[str, Any], done: dict[str, Any]) -> float | None:
    """A run is done a moment before its attempt has ended."""
    return done["finished"] - start["time"] if start and "finished" in done else None


def read_statuses(scale_folder: Path, earlier: bool = False) -> list[RunStatus]:
    """The runs of the last submit in its order; with ``earlier`` also those of other code or protocol, after them."""
    queue = read_json(scale_folder / "queue.json") or {"order": [], "work": {}}
    alive = is_held(queue_lock(scale_folder))
    with_slurm = standings(scale_folder)
    position = {name: number for number, name in enumerate(queue["order"])}
    folders = [f for f in run_folders(scale_folder) if earlier or f.name in position]
    folders.sort(key=lambda folder: (position.get(folder.name, len(position)), folder.name))
    statuses = [
        read_status(f, alive and is_asked_for(f, queue["work"]), with_slurm.get(f.name))
        for f in folders
    ]
    if (
        alive
        and not any(status.state == "RUNNING" for status in statuses)
        and _crowded(scale_folder)
    ):
        statuses = [
            replace(s, why=CROWDED) if s.state == "WAITING" and not s.job else s for s in statuses
        ]
    return statuses


def _crowded(scale_folder: Path) -> bool:
    """True where this machine's queue of the folder is kept waiting by others."""
    about = holder(queue_lock(scale_folder))
    here = about.get("host") == socket.gethostname()
    return here and taken_by_others(than=about["pid"]) > 0


def at_work(folder: Path) -> bool:
    """True while something may still change."""
    states = {status.state for status in read_statuses(folder)}
    return is_held(queue_lock(folder)) or bool(states & {"RUNNING", "WAITING", "UNKNOWN"})


def is_asked_for(folder: RunFolder, work: dict[str, int]) -> bool:
    """True where the queue still has to start this run: as many attempts as when it was asked for, and not done."""
    return folder.name in work and len(folder.attempts) <= work[folder.name] and folder.done is None


def _left_s(folder: RunFolder, about: dict, beat: dict) -> float | None:
    if "steps" not in about:
        return None
    recent = tail_records(folder.metrics, RATE_WINDOW)
    times = [
        record["wall_s"]
        for record in recent
        if "wall_s" in record and record.get("attempt") == about.get("attempt")
    ]
    return (about["steps"] - beat["step"]) * sum(times) / len(times) if times else None
