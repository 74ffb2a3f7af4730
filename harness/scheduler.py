"""What Slurm says about this user's jobs: squeue first, sacct for what the controller has forgotten.

squeue speaks for slurmctld and is believed: a job that it lists has the state that it says. sacct speaks for the database,
which calls a job NODE_FAIL while slurmctld has already put it back into the queue, so it is asked about jobs only that
slurmctld no longer knows. A job that neither lists is not gone for that, since an answer may be empty and a cluster without
accounting: it is gone where slurmctld says so, asked for that very job. A scheduler that does not answer is a SlurmError, and
then nothing is known; nobody is declared dead.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

REFRESH_S = 20.0
"""A scheduler is asked no more often than this, however often one looks."""
ANSWER_S = 60.0
"""A command of Slurm that takes longer has not answered."""
LOOK_S = 20.0
"""The same of a question that somebody at a terminal waits for."""
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED")
WORKING = ("RUNNING", "CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
BUSY = ("timed out", "unable to contact", "temporarily unavailable", "communication")
"""Words of a controller that has too much to do: what was sent may have arrived, or may arrive the next time."""
_asked: dict[Any, tuple[float, Any]] = {}


class SlurmError(RuntimeError):
    """A command of Slurm failed; the message is Slurm's."""


def is_busy(error: SlurmError) -> bool:
    """True where asking again may help."""
    return any(word in str(error).lower() for word in BUSY)


@dataclass(frozen=True)
class Job:
    """One job, or one task of an array, at one moment. ``source``: squeue, sacct or scontrol; ``ended``: in Unix time."""

    state: str
    reason: str = ""
    nodes: str = ""
    left_s: float | None = None
    name: str = ""
    source: str = "squeue"
    ended: float | None = None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def works(self) -> bool:
        return self.state in WORKING

    @property
    def lives(self) -> bool:
        """True while it waits or works. A word that a newer Slurm has and this list lacks is no end."""
        return self.state not in ENDS


ENDS = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "REVOKED"),
)


def ask_slurm(*command: str, input: str | None = None, within_s: float = ANSWER_S) -> str:
    """What a command prints. Raises SlurmError with its last words, also where it does not answer or is not there."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=within_s,
            input=input,
            env={**os.environ, "SLURM_BITSTR_LEN": "0"},  # no list of tasks is cut short
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]}: timed out after {within_s:.0f} s") from error
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {command[0]} here") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        said = [line.removeprefix(f"{command[0]}: ") for line in said]
        said = [line for line in said if not line.endswith(": No error")]  # of a job beside others
        words = [line for line in said if not line.startswith("Try ")] or ["no word"]  # "--help"
        raise SlurmError(f"{command[0]}: {words[-1]}")
    return done.stdout


@contextmanager
def outside_an_allocation() -> Iterator[None]:
    """No variable of an allocation that this may run in, but the one that says where the cluster's configuration is."""
    from submitit.helpers import clean_env

    where = os.environ.get("SLURM_CONF")
    with clean_env():
        if where is not None:
            os.environ["SLURM_CONF"] = where
        yield


def queued(fresh: bool = False) -> dict[str, Job]:
    """Job id (``12_3`` for a task) -> job, of all jobs of this user that slurmctld knows, ended ones of the last minutes too.

    One query, asked again after REFRESH_S at the earliest unless ``fresh``. Raises SlurmError.
    """
    asked_at, known = _asked.get("squeue", (-math.inf, {}))
    if fresh or time.monotonic() - asked_at > REFRESH_S:
        form = "--format=%i|%T|%r|%N|%L|%e|%j"
        command = ["squeue", "--me", "--array", "--states=all", "--noheader", form]
        text = ask_slurm(*command, within_s=ANSWER_S if fresh else LOOK_S)
        known = parse_squeue(text)
        _asked["squeue"] = (time.monotonic(), known)
    return known


def forget() -> None:
    """Ask again at the next look: this process has changed what the answer would be."""
    _asked.pop("squeue", None)


def parse_squeue(text: str) -> dict[str, Job]:
    """Lines of ``%i|%T|%r|%N|%L|%e|%j``."""
    found = {}
    for line in text.splitlines():
        parts = line.split("|", 6)
        if len(parts) == 7:
            job_id, state, reason, nodes, left, ends, name = parts
            reason = "" if reason == "None" else reason
            found[job_id] = Job(state, reason, nodes, seconds(left), name, ended=moment(ends))
    return found


def accounted(ids: Iterable[str], fresh: bool = False) -> dict[str, Job]:
    """The same of jobs that slurmctld has forgotten, from the database; {} on a cluster without one."""
    arrays = tuple(sorted({job_id.partition("_")[0] for job_id in ids}, key=int))
    if not arrays:
        return {}
    asked_at, known = _asked.get(arrays, (-math.inf, {}))
    if fresh or time.monotonic() - asked_at > REFRESH_S:
        columns = "--format=JobID,State,NodeList,ExitCode,End"
        command = ["sacct", "--allocations", "--noheader", "--parsable2", columns]
        try:
            known = parse_sacct(ask_slurm(*command, f"--jobs={','.join(arrays)}"))
        except SlurmError:
            known = {}  # no accounting here, or none that answers: then nothing is known from it
        _asked[arrays] = (time.monotonic(), known)
    return known


def parse_sacct(text: str) -> dict[str, Job]:
    """Lines of ``JobID|State|NodeList|ExitCode|End``. The state may say more ("CANCELLED by 0"); its first word counts."""
    found = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) >= 5 and parts[1]:
            job_id, state, nodes, code, ends = parts[:5]
            nodes = "" if nodes == "None assigned" else nodes
            about = {"source": "sacct", "ended": moment(ends)}
            found[job_id] = Job(state.split()[0], f"exit code {code}", nodes, **about)
    return found


def of_array(array: str, fresh: bool = False) -> dict[str, Job]:
    """The tasks of one array (or the one job) that slurmctld has when asked for it by its id; {} where it has none.

    Raises SlurmError where the answer is anything else, which says nothing.
    """
    asked_at, known = _asked.get(("scontrol", array), (-math.inf, {}))
    if fresh or time.monotonic() - asked_at > REFRESH_S:
        command = ["scontrol", "--oneliner", "show", "job", array]
        try:
            text = ask_slurm(*command, within_s=ANSWER_S if fresh else LOOK_S)
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
            known = {}
        else:
            known = parse_scontrol(text)
            if not known:
                raise SlurmError(f"scontrol: no word of job {array}")
        _asked["scontrol", array] = (time.monotonic(), known)
    return known


def parse_scontrol(text: str) -> dict[str, Job]:
    """Lines of ``scontrol --oneliner show job``. The tasks that still wait are one line, cancelled ones are in none."""
    found = {}
    for line in text.splitlines():
        about = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if "JobId" not in about or "JobState" not in about:
            continue
        reason, nodes = about.get("Reason", ""), about.get("NodeList", "")
        job = Job(
            about["JobState"],
            "" if reason == "None" else reason,
            "" if nodes == "(null)" else nodes,
            source="scontrol",
            ended=moment(about.get("EndTime", "")),
        )
        tasks = task_numbers(about.get("ArrayTaskId", ""))
        array = about.get("ArrayJobId", about["JobId"])
        found |= {f"{array}_{task}" if tasks else array: job for task in tasks or [0]}
    return found


def task_numbers(text: str) -> list[int]:
    """``0,3-5%2`` as 0, 3, 4, 5; ``0-8:4`` as 0, 4, 8."""
    found: list[int] = []
    for part in filter(None, text.partition("%")[0].split(",")):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def look_up(ids: Iterable[str], fresh: bool = False) -> dict[str, Job]:
    """Job id -> job for those of ``ids`` that Slurm knows; others it has not. Raises SlurmError, and then nothing is known."""
    wanted = set(ids)
    if not wanted:
        return {}
    known = queued(fresh)
    missing = wanted - known.keys()
    if missing and not fresh:
        known = queued(fresh=_young("squeue"))  # a job is not gone because one answer lacks it
        missing = wanted - known.keys()
    known = accounted(missing, fresh) | known
    for array in sorted({job_id.partition("_")[0] for job_id in wanted - known.keys()}):
        known = of_array(array, fresh) | known
    return {job_id: known[job_id] for job_id in wanted if job_id in known}


def _young(key: str) -> bool:
    """True once an answer is some seconds old, so that a second look costs at most one query in five seconds."""
    return time.monotonic() - _asked[key][0] > 5


def seconds(text: str) -> float | None:
    """[days-]hours:minutes:seconds, or shorter, as seconds; None for Slurm's words (UNLIMITED, NOT_SET, INVALID)."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in parts) or (days and not days.isdigit()):
        return None
    value = 0
    for part in parts:
        value = 60 * value + int(part)
    return value + 86400 * int(days or 0)


def moment(text: str) -> float | None:
    """Slurm's time of day, which is this machine's, in Unix time; None for its words (N/A, Unknown)."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def configuration() -> dict[str, str]:
    """``scontrol show config``, asked once a process. Raises SlurmError."""
    if "config" not in _asked:
        lines = ask_slurm("scontrol", "show", "config").splitlines()
        pairs = (line.partition("=") for line in lines if "=" in line)
        _asked["config"] = (0.0, {key.strip(): value.strip() for key, _, value in pairs})
    return _asked["config"][1]


def longest_times(partition: str | None) -> dict[str, float | None]:
    """Partition -> longest time limit in seconds, None for no limit; of those that ``partition`` lists, or the default one.

    Raises SlurmError.
    """
    asked = partition.split(",") if partition else None
    found = {}
    for line in ask_slurm("scontrol", "--oneliner", "show", "partition").splitlines():
        about = dict(word.partition("=")[::2] for word in line.split())
        name = about.get("PartitionName")
        if name in asked if asked else about.get("Default") == "YES":
            found[name] = seconds(about.get("MaxTime", ""))
    return found


def time_limit_s(directive: str) -> float | None:
    """What sbatch understands by ``--time``: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, _, clock = directive.rpartition("-")
    parts = clock.split(":")
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    if len(parts) > len(units) or not all(part.isdigit() for part in (days or "0", *parts)):
        return None
    return 86400 * int(days or 0) + sum(unit * int(part) for unit, part in zip(units, parts))


def describe(job_id: str) -> dict[str, str]:
    """``scontrol show job`` as a mapping; for one job that needs more than its state. Raises SlurmError."""
    words = ask_slurm("scontrol", "--oneliner", "show", "job", job_id).split()
    return dict(word.partition("=")[::2] for word in words if "=" in word)
