"""Work the runs of one experiment on this machine:  python -m harness.queue SCALE_DIR

``submit`` writes what is asked for into ``queue.json``; one queue at a time (``queue.lock``) starts a job for each run whose
needs are settled, never more at once than the machine has cores for, over all experiments of a user. It re-reads the file, so
a second submit adds to a queue that works. When it is told to end it ends its jobs; if it is killed outright, the kernel
tells them (``harness/processes.py``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from harness.cores import take_cores
from harness.identity import TOOLS, take_snapshot
from harness.processes import end_leftovers, own_environment, signalled_when_parent_dies
from harness.run_folder import Busy, RunFolder, edit_json, hold, read_json
from harness.run_status import is_asked_for, queue_lock
from harness.slurm import job_ids
from harness.sync import end_follower, start_follower

TICK_S = 0.5
"""How often finished jobs are collected and the display drawn."""
LOOKS_SHARE = 9
"""Rest after a look, in multiples of what it took: a thousand runs to look at must not take a core from those that work."""


def ask(scale_folder: Path, order: list[str], names: list[str]) -> None:
    """Ask for one more attempt at each of ``names``; ``order`` is the order of all runs of this submit.

    What an earlier submit asked for and no queue has started yet stays asked for, after them.
    """
    wanted = {name: len(RunFolder(scale_folder / name).attempts) for name in names}
    with edit_json(scale_folder / "queue.json") as queue:
        work = {**queue.get("work", {}), **wanted}
        left = [
            name
            for name in queue.get("order", [])
            if name not in order and is_asked_for(RunFolder(scale_folder / name), work)
        ]
        queue.update(order=[*order, *left], work=work)


def take_over(scale_folder: Path, names: Sequence[str]) -> None:
    """The next attempt at each of ``names`` is this machine's: what became of an earlier job of Slurm's says nothing of it.

    For the holder of ``submit.lock``, under which they were found to have no job that lives.
    """
    if (scale_folder / "slurm.json").exists():
        with edit_json(scale_folder / "slurm.json") as ids:
            for name in names:
                ids.pop(name, None)


def withdraw(scale_folder: Path, names: list[str] | None = None) -> None:
    """Ask no longer for ``names`` (None: for nothing)."""
    if not (scale_folder / "queue.json").exists():
        return
    with edit_json(scale_folder / "queue.json") as queue:
        work = queue["work"].items()
        queue["work"] = {n: k for n, k in work if names is not None and n not in names}


@dataclass
class Job:
    """A started job and the cores it holds."""

    folder: RunFolder
    process: subprocess.Popen
    cores: ExitStack


@dataclass
class Queue:
    """Starts what ``queue.json`` asks for. ``work`` returns when nothing is left, or when stopped."""

    scale_folder: Path
    tracking_uri: str | None = None
    """MLflow store to keep up to date meanwhile."""
    jobs: dict[str, Job] = field(default_factory=dict)
    stopping: bool = False
    sync_failed: bool = False

    def __post_init__(self) -> None:
        # Jobs start over hours: they work with this queue's code, not with what has been edited since.
        self.code = take_snapshot(self.scale_folder.parents[1] / ".code", code=TOOLS).path.resolve()

    def work(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Raises Busy where another queue works here. ``on_tick`` is called about twice a second."""
        with self._signals(), ExitStack() as after:
            with hold(queue_lock(self.scale_folder)):
                if self.tracking_uri is not None:
                    follower = start_follower(self.scale_folder, self.tracking_uri)
                    after.callback(self._end_follower, follower)
                try:
                    while self._step(on_tick):
                        pass
                finally:
                    self._end_jobs()  # none is left, unless something above failed

    def _step(self, on_tick: Callable[[], None]) -> bool:
        """Collect, start, show, wait a tick. False when there is nothing left to do."""
        began = time.monotonic()
        self._collect()
        if self.stopping:
            self._end_jobs()
        else:
            self._start()
        on_tick()
        if not self.jobs and (self.stopping or not self._waiting()):
            return False
        rested = time.monotonic() + max(TICK_S, LOOKS_SHARE * (time.monotonic() - began))
        while time.monotonic() < rested and not self.stopping:
            time.sleep(TICK_S)
        return True

    def _end_follower(self, follower: subprocess.Popen) -> None:
        self.sync_failed = end_follower(follower) != 0

    def _waiting(self) -> list[RunFolder]:
        queue = read_json(self.scale_folder / "queue.json") or {"order": [], "work": {}}
        elsewhere = {*self.jobs, *job_ids(self.scale_folder)}  # what was sent to Slurm is its own
        folders = [RunFolder(self.scale_folder / n) for n in queue["order"] if n not in elsewhere]
        return [folder for folder in folders if is_asked_for(folder, queue["work"])]

    def _start(self) -> None:
        waiting = self._waiting()
        unsettled = {folder.name for folder in waiting} | set(self.jobs)
        for folder in waiting:
            if any(need.name in unsettled for need in folder.needs):
                continue
            cores = take_cores(folder.run["resources"]["cpus_per_node"])
            if cores is None:
                return
            self.jobs[folder.name] = Job(folder, start_job(folder, self.code), cores)

    def _collect(self) -> None:
        for name, job in list(self.jobs.items()):
            if job.process.poll() is None:
                continue
            end_leftovers(job.folder.mark)  # of a job that was itself killed
            job.cores.close()
            del self.jobs[name]
            if len(job.folder.attempts) <= self._asked_at(name) and job.folder.done is None:
                withdraw(self.scale_folder, [name])  # it could not even open an attempt

    def _asked_at(self, name: str) -> int:
        queue = read_json(self.scale_folder / "queue.json") or {"work": {}}
        return queue["work"].get(name, -1)

    def _end_jobs(self) -> None:
        for job in self.jobs.values():
            job.process.terminate()
        for job in self.jobs.values():
            job.process.wait()
        self._collect()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP stop the queue; what was set before comes back."""

        def stop(*_: object) -> None:
            self.stopping = True

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def start_job(folder: RunFolder, code: Path) -> subprocess.Popen:
    """``python -m harness.job``, imported from ``code``, in a session of its own: Ctrl-C reaches the queue and not the job."""
    queue = os.getpid()
    with open(folder.path / "job.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "harness.job", str(folder.path.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_without_slurm(own_environment(code)),
            start_new_session=True,
            preexec_fn=lambda: signalled_when_parent_dies(signal.SIGTERM, queue),
        )


def _without_slurm(environment: dict[str, str]) -> dict[str, str]:
    """No variable of an allocation that the queue may work in: its job is not the run's, to be requeued with it."""
    return {k: v for k, v in environment.items() if not k.startswith(("SLURM_", "SLURMD_"))}


def start_detached(scale_folder: Path, tracking_uri: str | None) -> int:
    """Start a queue that outlives this terminal; returns its process id."""
    arguments = [str(scale_folder.resolve())]
    arguments += ["--tracking-uri", tracking_uri] if tracking_uri is not None else []
    with open(scale_folder / "queue.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.queue", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=own_environment(),
            start_new_session=True,
        )
    return process.pid


def main(
    scale_folder: Annotated[Path, typer.Argument(help="runs/<experiment>/<scale>")],
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow store to keep current")] = None,
) -> None:
    """Work what is asked for in a folder of runs, then end."""
    try:
        Queue(scale_folder, tracking_uri).work()
    except Busy as error:
        typer.echo(f"a queue works here already: {error}")


if __name__ == "__main__":
    typer.run(main)
