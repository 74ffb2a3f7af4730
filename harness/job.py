"""One attempt at one run:  python -m harness.job RUN_DIR

Takes the run's lock, opens ``attempts/NN/``, starts the command in a session of its own, and watches: its end, a signal to
this job, its heartbeat, its time limit. Whatever happens, no process outlives the job, and ``end.json`` says how it ended.
``done.json`` is written before it, as soon as the product was checked; nothing else makes a run done. On Slurm an attempt that
was interrupted puts its run back into the queue (``harness/requeue.py``). Exit codes: 0 done, 1 ended otherwise, 75 another
job works here.

The watch is one thread and one system call: signals are blocked from the start and collected with ``sigtimedwait``.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import container, fingerprints, inputs, notify, requeue
from harness.avoid import steer
from harness.causes import cause
from harness.cluster import Cluster
from harness.command import (
    cluster_line,
    code_path,
    command_line,
    environment,
    own_variables,
)
from harness.identity import changed_snapshot
from harness.memory import kills_in_job
from harness.needs import inherited, plan_digest, unmet_need
from harness.outcome import judge_exit, judge_told, last_lines
from harness.processes import (
    become_subreaper,
    dump_stacks,
    end_descendants,
    end_leftovers,
    reap,
    signalled_when_parent_dies,
)
from harness.run_folder import (
    Busy,
    RunFolder,
    edit_json,
    hold,
    read_json,
    tail_records,
    write_json,
)
from harness.scheduler import SlurmError

WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
SAVE_AND_STOP = signal.SIGUSR2
"""What the command is sent when Slurm is about to take the nodes away. One that does not know it ends by it."""
TICK_S = 1.0
"""How often the heartbeat is looked at."""
GRACE_S = 10.0
"""Time that the command has to end after SIGTERM."""
EX_TEMPFAIL = 75
HANG_FLOOR_S, USUAL_STEPS = 120.0, 10
"""A bound from a run's own steps is never below the first, and counts from the second on."""
HANDOVER_S = 120.0
"""How long a requeued job waits for the lock of its own last attempt, which a file server may keep for a dead node."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    state: str
    reason: str
    exit_code: int | None = None
    goes_back: bool = False
    """The job is to be requeued: this is not the run's last word."""


def run_job(run_dir: str | Path) -> Ending:
    """Work one attempt of ``run_dir`` to its end. Raises Busy where another job holds the run."""
    folder = RunFolder(Path(run_dir).resolve())
    run = folder.run
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    with hold(folder.lock, job=fingerprints.scheduler().get("slurm_job_id")):
        if folder.done is not None:
            return Ending("DONE", "was done before")
        end_leftovers(folder.mark)
        job_id = requeue.own_job()
        cluster = requeue.profile(folder.path.parent)
        if requeue.close_attempts(folder, job_id) and job_id is not None:
            steer(folder.path.parent, cluster)
        if ended := _not_again(folder, job_id, cluster):
            return ended
        attempt = folder.new_attempt()
        started = time.time()
        # At once: whose attempt this is must be known however early it ends.
        about = {"time": started, "pid": os.getpid(), **fingerprints.scheduler()}
        write_json(attempt / "start.json", about)
        facts: dict[str, Any] = {}
        try:
            if blocked := unmet_need(folder):
                ending = Ending("BLOCKED", blocked)
            elif other := changed_snapshot(code_path(folder, run), run["fingerprints"]["code"]):
                ending = Ending("CONFIG", other)
            elif other := inputs.changed(run.get("inputs", [])):
                ending = Ending("CONFIG", other)
            elif other := container.other_image(run, cluster.container, folder.path.parents[2]):
                ending = Ending("CONFIG", other)
            else:
                ending, facts = _attempt(folder, run, attempt, cluster)
        except Exception as error:  # whatever it was: a reason, and not "killed"
            ending = Ending("FAILED", f"the job failed: {type(error).__name__}: {error}")
        if job_id is not None:
            ending = _decide(
                folder, job_id, ending, cluster, _end(folder, attempt, ending, started)
            )
        write_json(attempt / "end.json", _end(folder, attempt, ending, started) | facts)
        return ending


def _end(folder: RunFolder, attempt: Path, ending: Ending, started: float) -> dict[str, Any]:
    """The content of end.json."""
    beat, ended = folder.heartbeat or {}, time.time()
    lost = (read_json(attempt / "reason.json") or {}).get("nodes")
    return {
        "state": ending.state,
        "reason": f"{ending.state}: {ending.reason}" if ending.reason else ending.state,
        "exit_code": ending.exit_code,
        "step": beat.get("step") if beat.get("time_unix", 0) >= started else None,
        "started": started,
        "ended": ended,
        "duration_s": ended - started,
        "requeued": ending.goes_back,
        **({} if lost is None else {"lost_nodes": lost}),  # []: no node is to blame
        "last_lines": last_lines(attempt / "output.log"),
    }


def _decide(
    folder: RunFolder, job_id: str, ending: Ending, cluster: Cluster, end: dict[str, Any]
) -> Ending:
    """The ending with its place in the queue: back into it, or out of it, with the count in words."""
    ends = [*requeue.ends_of_job(folder, job_id), end]
    back, words = requeue.may_go_back(ends, cluster.attempts)
    if not words:
        return ending
    verb = requeue.BACK if back else requeue.STAYED
    return replace(ending, reason=f"{ending.reason}; {verb}: {words}", goes_back=back)


def _go_back(folder: RunFolder, job_id: str, ending: Ending) -> Ending:
    """Put the run back into the queue; what became of that."""
    attempt = folder.attempts[-1]
    try:
        requeue.go_back(job_id)
    except SlurmError as error:
        requeue.lost_its_place(folder, attempt, str(error))
        reason = f"{requeue.without_place(ending.reason)}; {requeue.STAYED}: {error}"
        return replace(ending, reason=reason, goes_back=False)
    return ending


def _not_again(folder: RunFolder, job_id: str | None, cluster: Cluster) -> Ending | None:
    """How this job ends at once where Slurm requeued it by itself: after an outcome, or once more than it may."""
    ends = requeue.ends_of_job(folder, job_id) if job_id is not None else []
    if not ends or ends[-1].get("requeued"):
        return None
    state = ends[-1]["state"]
    if cause(state).kind == "outcome":
        return Ending(state, "not started again: this is an outcome, see `python -m harness.retry`")
    back, words = requeue.may_go_back(ends, cluster.attempts)
    return None if back or not words else Ending(state, f"not started again: {words}")


def _attempt(
    folder: RunFolder, run: dict[str, Any], attempt: Path, cluster: Cluster
) -> tuple[Ending, dict]:
    prints = {"code": run["fingerprints"]["code"], "hardware": fingerprints.hardware()}
    if run.get("image"):
        installed = {}  # harness/inside.py writes them
        prints["image"] = run["image"]["sha256"]
    else:
        installed = fingerprints.packages()
        prints["packages"] = fingerprints.packages_hash(installed)
    folder.update_run(fingerprints=prints, **inherited(folder))
    scratch = tempfile.mkdtemp(prefix="m")  # short: Ray's socket paths below it must fit 107 bytes
    arguments = command_line(folder, run, attempt, scratch, cluster)
    with edit_json(attempt / "start.json") as start:
        start |= {
            "command": arguments,
            "plan": plan_digest(folder),
            "fingerprints": prints,
            "packages": installed,
        }
    become_subreaper()
    job = os.getpid()

    def in_child() -> None:
        signal.signal(SAVE_AND_STOP, signal.SIG_DFL)  # ignored at the start of a Slurm job
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        signalled_when_parent_dies(signal.SIGKILL, job)

    started, variables = arguments, environment(own_variables(folder, run, scratch))
    if over_several_nodes(run):
        started, variables = cluster_line(folder, run, scratch)
    try:
        with open(attempt / "output.log", "ab") as log:
            child = subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=attempt,  # nothing to import here: code comes from the snapshot
                env=variables,
                start_new_session=True,
                preexec_fn=in_child,
            )
        try:
            ending = _watch(child, folder, run, attempt)
        finally:
            # The second: what a step of Slurm's holds, which is no descendant.
            remained = [*end_descendants(), *end_leftovers(folder.mark)]
        return ending, {"ended_with_it": remained} if remained else {}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def over_several_nodes(run: dict[str, Any]) -> bool:
    """True where what this job starts is the keeper of a Ray cluster, which starts the command on it."""
    return requeue.own_job() is not None and run["resources"].get("nodes", 1) > 1


def _watch(
    child: subprocess.Popen, folder: RunFolder, run: dict[str, Any], attempt: Path
) -> Ending:
    """Wait for the first of: the command's end, a signal, a hang, the time limit."""
    resources = run["resources"]
    job_id, kills = requeue.own_job(), kills_in_job() or 0
    progress, seen_at, started = None, time.monotonic(), time.monotonic()
    while True:
        caught = signal.sigtimedwait(WATCHED, TICK_S)
        ended = reap()
        if child.pid in ended:
            child.returncode = container.own_code(ended[child.pid])
            # Slurm signals every process of a job at once, and the command may be the first to go.
            patience_s = 0.5 if child.returncode < 0 else 0.0
            if child.returncode and (number := _signalled(caught, patience_s)) is not None:
                told = requeue.notice(number, job_id)
                return _as_told(told, number, folder, attempt, child.returncode)
            memory = (kills_in_job() or 0) > kills
            return Ending(*judge_exit(folder, attempt, child.returncode, memory), child.returncode)
        now = time.monotonic()
        if (number := _signalled(caught)) is not None:
            return _told_to_end(number, child, folder, attempt)
        latest = _progress(folder, attempt, since=_start_time(attempt))
        if latest != progress:
            progress, seen_at = latest, now
        phase = progress[0] if progress else "starting"
        if now - seen_at > hang_bound(folder, attempt, phase, resources["hang_after_s"]):
            dump_stacks(attempt / "stacks", folder.mark)
            code = _stop(child, attempt, signal.SIGABRT)  # faulthandler writes every thread's stack
            where = f"in phase {progress[0]} at step {progress[1]}" if progress else "ever"
            return Ending("HANG", f"no progress for {now - seen_at:.0f} s {where}", code)
        if job_id is None and now - started > resources["time_limit_s"]:  # else it is Slurm's
            code = _stop(child, attempt)
            return Ending("TIMEOUT", f"over its time limit of {resources['time_limit_s']} s", code)


def _signalled(caught: signal.struct_siginfo | None, patience_s: float = 0.0) -> int | None:
    """The signal that tells this job to end: the one caught, or one that arrives within ``patience_s``."""
    if caught is None or caught.si_signo == signal.SIGCHLD:
        caught = signal.sigtimedwait([s for s in WATCHED if s != signal.SIGCHLD], patience_s)
    return None if caught is None else caught.si_signo


def _told_to_end(number: int, child: subprocess.Popen, folder: RunFolder, attempt: Path) -> Ending:
    """A signal to the job: let the command save where Slurm leaves time for it, then end."""
    told = requeue.notice(number, requeue.own_job())
    if told.seconds_left > 0:
        code = _stop(child, attempt, SAVE_AND_STOP, told.seconds_left)
    else:
        code = _stop(child, attempt)
    return _as_told(told, number, folder, attempt, code)


def _as_told(
    told: requeue.Notice, number: int, folder: RunFolder, attempt: Path, code: int | None
) -> Ending:
    """The ending of a command that ended with ``code`` when the job was told to: done stays done, and an outcome one."""
    # Of another signal the command's processes may have had their own, and of several nodes one may be lost.
    alone = number == signal.SIGUSR2 and told.seconds_left > 0
    own = judge_told(folder, attempt, code, alone and not over_several_nodes(folder.run))
    return Ending(*(own or (told.state, told.reason)), code)


def _stop(
    child: subprocess.Popen,
    attempt: Path,
    number: signal.Signals = signal.SIGTERM,
    patience_s: float = GRACE_S,
) -> int | None:
    """Ask the command to end; after ``patience_s`` its descendants are ended with it. Returns its code where it obeyed."""
    # A cluster's keeper must know too, and passes it on: on a hang it has the other nodes write their stacks first.
    through = over_several_nodes(RunFolder(attempt.parents[1]).run)
    listener = child.pid if through else container.command_pid(attempt, child.pid)
    with suppress(ProcessLookupError):  # the command has ended, and its runtime is about to
        os.kill(listener, number)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        signal.sigtimedwait([signal.SIGCHLD], 0.2)
        ended = reap()
        if child.pid in ended:
            child.returncode = container.own_code(ended[child.pid])
            return child.returncode
    child.returncode = -signal.SIGKILL  # end_descendants does it
    return None


def _start_time(attempt: Path) -> float:
    """When the command was about to start: start.json is written at the attempt's beginning and completed then."""
    return (attempt / "start.json").stat().st_mtime


def _progress(folder: RunFolder, attempt: Path, since: float) -> tuple[Any, ...] | None:
    """What must change for an attempt to be alive: phase and step of its heartbeat, else the size of its log."""
    beat = folder.heartbeat
    if beat is not None and beat["time_unix"] >= since:
        return beat["phase"], beat["step"]
    return "starting", (attempt / "output.log").stat().st_size


def hang_bound(folder: RunFolder, attempt: Path, phase: str, ceiling_s: float) -> float:
    """Seconds without progress that are a hang: ``ceiling_s`` until this attempt's own steps say what is usual.

    They say it of steps alone: an evaluation may take many times as long as they do. ``ceiling_s`` bounds what is usual, but
    never below three of the longest of its steps: a run whose steps are slower than somebody thought is no hang.
    """
    if phase != "training":
        return ceiling_s
    took = [
        record["wall_s"]
        for record in tail_records(folder.metrics, 50)
        if record.get("attempt") == int(attempt.name) and "wall_s" in record
    ]
    if len(took) < USUAL_STEPS:
        return ceiling_s
    usual = max(HANG_FLOOR_S, 20 * statistics.median(took))
    return max(min(ceiling_s, usual), 3 * max(took))


def main(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder, with its run.json")],
) -> None:
    """Work one attempt of a run: start its command, watch it, end everything with it, record how it ended."""
    job_id, deadline = requeue.own_job(), time.monotonic() + HANDOVER_S
    while True:
        try:
            ending = run_job(run_dir)
            break
        except Busy as error:
            if job_id is None or time.monotonic() > deadline:
                typer.echo(f"{run_dir.name}: {error}", err=True)
                raise typer.Exit(EX_TEMPFAIL) from error
            time.sleep(1.0)
    folder = RunFolder(run_dir.resolve())
    if ending.goes_back:
        ending = _go_back(folder, job_id, ending)
    elif job_id is not None and ending.state == "PREEMPTED":
        try:
            requeue.stay_out(job_id)
        except SlurmError as error:  # Slurm starts it again, and that start sees that it may not
            typer.echo(f"{folder.name}: it may be started once more: {error}", err=True)
    if job_id is not None and requeue.COUNTED.get(ending.state) == "failed":
        # After the requeue: only a job that waits can be told, and this process still has KillWait seconds.
        again = job_id if ending.goes_back else None
        for line in steer(folder.path.parent, requeue.profile(folder.path.parent), again).lines():
            typer.echo(f"{run_dir.name}: {line}")
    typer.echo(f"{run_dir.name}: {ending.state}{f': {ending.reason}' if ending.reason else ''}")
    notify.after(folder, goes_back=ending.goes_back)
    if ending.goes_back:
        signal.sigtimedwait([signal.SIGTERM], 60)  # Slurm ends this process
    raise typer.Exit(0 if ending.state == "DONE" else 1)


if __name__ == "__main__":
    typer.run(main)
