"""What a job does about Slurm: why it was signalled, whether its run may go back into the queue, and putting it there.

A run requeues exactly its own array task. Three counters bound it, one for each reason (``attempts`` of the cluster's profile);
they count the attempts of the present job, so a submit or a retry by a person starts them anew. A time-out counts as
progress only where the attempt got further than those before it: a run that never reaches its first checkpoint does not
circle for ever.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.causes import from_slurm
from harness.cluster import Attempts, Cluster
from harness.run_folder import (
    Busy,
    RunFolder,
    hold,
    read_json,
    write_json,
)
from harness.scheduler import SlurmError, ask_slurm, describe, is_busy

PROFILE = "MOLT_PROFILE"
"""Names the copy of the profile that a job was sent with: a later submit with another one reaches no job that waits."""
COUNTED = {
    "PREEMPTED": "preempted",
    "TIMEOUT": "timed_out",
    "NODE_FAIL": "failed",
    "INFRA": "failed",
}
"""How an attempt ended -> the counter that it counts in. What is not here does not go back by itself."""
BACK, STAYED = "back into the queue", "not put back into the queue"
"""What a reason says of the run's place, after a semicolon."""
TRIES, PAUSE_S = 6, 2.0
"""How often a requeue that is not answered is sent, and the first pause, which doubles."""
MARGIN_S = 10.0
"""Kept back of the time that Slurm leaves, for ending the processes and asking to be requeued."""


@dataclass(frozen=True)
class Notice:
    """Slurm takes the job's nodes away: PREEMPTED, TIMEOUT or KILLED, and the seconds left to save in."""

    state: str
    reason: str
    seconds_left: float


def own_job() -> str | None:
    """``12_3`` of a task, ``12`` of a job, None outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def notice(number: int, job_id: str | None) -> Notice:
    """What a signal to the job means, told by slurmctld; by the signal alone where that does not answer."""
    name = signal.Signals(number).name
    told = Notice("KILLED", f"the job was told to end ({name})", 0.0)
    if job_id is None:
        return told
    try:
        facts = describe(job_id)
    except SlurmError:
        facts = {}
    if facts.get("PreemptTime", "None") != "None":
        return Notice("PREEMPTED", f"preempted on {facts.get('NodeList')}", _left(facts))
    limit = facts.get("TimeLimit", "unknown")
    if number == signal.SIGUSR2:
        return Notice("TIMEOUT", f"its time limit of {limit} came near", _left(facts))
    # The warning may have come before the job could hear it: Slurm sends it up to a minute early.
    if facts.get("Reason") == "TimeLimit" or facts.get("JobState") == "TIMEOUT":
        return Notice("TIMEOUT", f"its time limit of {limit} is over", 0.0)
    return told


def _left(facts: dict[str, str]) -> float:
    """Seconds until Slurm ends the job, less the margin; of an unknown end, a guess that is safe with GraceTime 0."""
    try:
        end = datetime.fromisoformat(facts.get("EndTime", "")).timestamp()
    except ValueError:
        return MARGIN_S
    return max(0.0, end - time.time() - MARGIN_S)


def profile(scale_folder: Path) -> Cluster:
    """The cluster's profile that this job was sent with; outside such a job, that of the last submit."""
    sent = os.environ.get(PROFILE)
    if sent is None:
        return Cluster.model_validate(read_json(scale_folder / "cluster.json") or {})
    return Cluster.model_validate_json(Path(sent).read_text())


def may_go_back(ends: Sequence[dict[str, Any]], limits: Attempts) -> tuple[bool, str]:
    """Whether the run goes back into the queue after ``ends`` (end.json of this job's attempts), and the count in words."""
    counter = COUNTED.get(ends[-1]["state"])
    if counter is None:
        return False, ""
    count = Counter(COUNTED.get(end["state"]) for end in ends)[counter]
    allowed = getattr(limits, counter)
    words = f"{counter.replace('_', ' ')} {count} of at most {allowed} times"
    if counter == "timed_out" and len(ends) > 1:
        before = max((end.get("step") or 0 for end in ends[:-1]), default=0)
        if (ends[-1].get("step") or 0) <= before:
            return False, f"{words}, and got no further than step {before} of an earlier attempt"
    return count <= allowed, words


def without_place(reason: str) -> str:
    """Why an attempt ended, without what became of its place in the queue."""
    return re.split(f"; (?:{BACK}|{STAYED}): ", reason)[0]


def ends_of_job(folder: RunFolder, job_id: str) -> list[dict[str, Any]]:
    """How the attempts that this job has made ended, in order."""
    found = []
    for attempt in folder.attempts:
        start, end = read_json(attempt / "start.json"), read_json(attempt / "end.json")
        if start is not None and end is not None and job_of(start) == job_id:
            found.append(end)
    return found


def job_of(start: dict[str, Any]) -> str | None:
    """The job that an attempt's start.json names."""
    array, task = start.get("slurm_array_job_id"), start.get("slurm_array_task_id")
    return f"{array}_{task}" if array and task else start.get("slurm_job_id")


def close_attempts(folder: RunFolder, job_id: str | None) -> bool:
    """Write the missing end of the last attempt, whose job was gone before it could; True where one was missing.

    Only the holder of the lock may.
    """
    attempts = folder.attempts
    if not attempts or (attempts[-1] / "end.json").exists():
        return False
    start = read_json(attempts[-1] / "start.json") or {}
    beat = folder.heartbeat or {}
    began = start.get("time", attempts[-1].stat().st_mtime)
    ended = max(began, beat.get("time_unix", began))
    state, reason, lost = _afterwards(job_of(start), again=job_of(start) == job_id)
    write_json(
        attempts[-1] / "end.json",
        {
            "state": state,
            "reason": f"{state}: {reason}",
            "exit_code": None,
            "step": beat.get("step") if beat.get("time_unix", 0) >= began else None,
            "started": began,
            "ended": ended,
            "duration_s": ended - began,
            "written_by": "the next attempt",
            **({"lost_nodes": lost} if state == "NODE_FAIL" else {}),
        },
    )
    return True


def _afterwards(job_id: str | None, again: bool) -> tuple[str, str, list[str]]:
    """What became of a job that left no word, and the nodes at fault: Slurm's records of it, the last that is an end.

    ``again``: the same job is running once more, so what is looked for is an end before the present one.
    """
    if job_id is not None:
        columns = ["--noheader", "--parsable2", "--format=State,NodeList"]
        try:
            text = ask_slurm("sacct", "--allocations", "--duplicates", f"--jobs={job_id}", *columns)
        except SlurmError:
            text = ""  # a cluster without accounting
        records = [line.split("|") for line in text.splitlines()]
        for state, nodes in reversed(records):
            word = state.split()[0] if state else ""
            if word in ("RUNNING", "PENDING", "COMPLETING", "REQUEUED", ""):
                continue
            lost = _failed_of(nodes) if word in ("NODE_FAIL", "BOOT_FAIL") else []
            return *from_slurm(word, ",".join(lost) or nodes, ""), lost
        if again:
            return "NODE_FAIL", "its job was put back into the queue without a word of its own", []
    return "KILLED", "its job was killed without a word", []


def _failed_of(nodes: str) -> list[str]:
    """Those of Slurm's list ``nodes`` that failed: the one, or of several those that are down now; [] where none is."""
    if not nodes or not ("[" in nodes or "," in nodes):
        return [nodes] if nodes else []
    try:
        text = ask_slurm("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T")
    except SlurmError:
        return []
    listed = {tuple(line.strip().split("|")) for line in text.splitlines()}
    # A star: it does not answer.
    return sorted(
        n for n, state in listed if state.endswith("*") or state.startswith(("down", "fail"))
    )


def stay_out(job_id: str) -> None:
    """Keep Slurm from requeueing this job by itself when it takes the nodes away. Raises SlurmError."""
    ask_slurm("scontrol", "update", f"JobId={job_id}", "Requeue=0")


def go_back(job_id: str) -> None:
    """Requeue this very job; Slurm ends this process after it. Raises SlurmError where it was refused or never answered.

    A request that was not answered may have arrived: before it is sent again, Slurm is asked whether the job still runs.
    """
    pause, refused = PAUSE_S, False
    for remaining in reversed(range(TRIES)):
        try:
            ask_slurm("scontrol", "requeue", job_id)
            return
        except SlurmError as error:
            left = _has_left(job_id)
            if left:
                return
            if left is False and not is_busy(error):  # one that answers has refused
                if refused:
                    raise
                refused = True  # or has only just come back: once more
            if not remaining:
                raise SlurmError(f"{error}, {TRIES} times") from error
        if signal.sigtimedwait([signal.SIGTERM], pause) is not None:
            return  # Slurm ends the job: so the request has arrived
        pause *= 2


def _has_left(job_id: str) -> bool | None:
    """Whether slurmctld says that the job runs no more, or again; None where it says nothing."""
    try:
        facts = describe(job_id)
    except SlurmError:
        return None
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return facts.get("JobState") != "RUNNING" or int(facts.get("Restarts", "0")) > restarts


def lost_its_place(folder: RunFolder, attempt: Path, why: str) -> None:
    """Correct the end of ``attempt``, which says that the run went back: it did not, and ``harness.retry`` goes on."""
    with suppress(Busy), hold(folder.lock, job=own_job()):  # Busy: it did after all, and works
        end = read_json(attempt / "end.json")
        if folder.attempts[-1] != attempt or end is None:
            return
        reason = f"{without_place(end['reason'])}; {STAYED}: {why}"
        write_json(attempt / "end.json", {**end, "requeued": False, "reason": reason})
