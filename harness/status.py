"""What every run is doing:  python -m harness.status [EXPERIMENT] [--scale S] [--runs DIR] [--watch] [--json]

Reading changes nothing. A run is RUNNING while a job holds its lock, DONE when done.json exists, WAITING while a queue will
start it; every other word is how its last attempt ended (``harness/causes.py``). Where a run was sent to Slurm and its folder
leaves it open, Slurm is asked, once for all (``harness/standing.py``); what nobody can tell is UNKNOWN.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.avoid import last_decision
from harness.cores import taken_by_others
from harness.requeue import job_of
from harness.run_folder import (
    RunFolder,
    holder,
    is_held,
    read_json,
    run_folders,
    scale_folders,
    tail_records,
)
from harness.standing import Standing, standings

RATE_WINDOW = 20
"""Steps over which the time left is estimated."""
CROWDED = "runs of other queues hold this machine's cores; it is started when they end"
STYLES = {
    "DONE": "green",
    "RUNNING": "cyan",
    "WAITING": "dim",
    "PLANNED": "dim",
    "UNKNOWN": "yellow",
}


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


def duration(seconds: float | None) -> str:
    """7 s, 1:05, 2:03:00; a dash where there is none."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def table(statuses: list[RunStatus], title: str) -> Table:
    """For a terminal of 80 columns where it can be: a column that says the same of every run is left out."""
    columns = {
        "run": [status.run for status in statuses],
        "state": [_colored(status.state) for status in statuses],
        "phase": [status.phase or "-" for status in statuses],
        "step": [_step(status) for status in statuses],
        "reward": ["-" if s.reward_mean is None else f"{s.reward_mean:.3f}" for s in statuses],
        "took": [duration(status.elapsed_s) for status in statuses],
        "left": [duration(status.left_s) for status in statuses],
        "attempt": [str(status.attempt or "-") for status in statuses],
        "node": [status.node or "-" for status in statuses],
    }
    telling = {"attempt": {"-", "1"}, "node": {"-"}, "phase": {"-"}, "left": {"-"}}
    # On a machine's own queue every run has this machine's name.
    if len({s.node for s in statuses if s.node}) < 2 and not any(s.job for s in statuses):
        columns.pop("node")
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    kept = {name: cells for name, cells in columns.items() if set(cells) - telling.get(name, set())}
    for name, cells in kept.items():
        right = name not in ("run", "state", "phase", "node")
        widest = max(Text.from_markup(cell).cell_len for cell in [name, *cells])
        least = None if name == "run" else widest  # where it is narrow, names lose their end first
        shown.add_column(name, justify="right" if right else "left", no_wrap=True, min_width=least)
    for row in zip(*kept.values()):
        shown.add_row(*row)
    return shown


def _colored(state: str) -> str:
    return f"[{STYLES.get(state, 'red')}]{state}[/]"


def _step(status: RunStatus) -> str:
    if not status.steps:
        return "-"
    return f"{'-' if status.step is None else status.step}/{status.steps}"


def log_of(folder: Path, status: RunStatus) -> Path:
    return folder / status.run / "attempts" / f"{status.attempt:02d}" / "output.log"


def reasons(statuses: list[RunStatus], folder: Path) -> list[str]:
    """Why runs are not done, each reason once, and where to read on."""
    alike: dict[tuple[str, str], list[RunStatus]] = {}
    for status in statuses:
        if status.why:
            alike.setdefault((status.state, status.why), []).append(status)
    lines = []
    for (state, why), found in alike.items():
        first, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
        lines.append(f"{first.run}{more} {state}: {why}")
        if first.attempt:
            lines.append(f"    {log_of(folder, first)}")
    if lines:
        lines.append("What to do: python -m harness.why RUN")
    return lines


def main(
    experiment: Annotated[str | None, typer.Argument(help="name; all where left out")] = None,
    scale: Annotated[str | None, typer.Option(help="only this scale")] = None,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    earlier: Annotated[
        bool, typer.Option("--earlier", help="also runs of other code or protocol")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="live, until nothing works any more; Ctrl-C ends it")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines, on stdout")] = False,
) -> None:
    """Show the state of every run, and why a run is not done. Reading changes nothing.

    Exit codes: 0 shown; 2 there is no such experiment.
    """
    console = Console()
    try:
        folders = scale_folders(runs, experiment, scale)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if watch:
        from harness.show import watch_all  # here: it draws what this module reads

        watch_all(console, folders)
        return
    found = {f"{f.parent.name}/{f.name}": read_statuses(f, earlier) for f in folders}
    if as_json:
        print(json.dumps({name: [asdict(s) for s in all_] for name, all_ in found.items()}))
        return
    for folder, (name, statuses) in zip(folders, found.items()):
        done = sum(status.state == "DONE" for status in statuses)
        console.print(table(statuses, f"{name}: {done} of {len(statuses)} runs done"))
        for reason in [*reasons(statuses, folder), *last_decision(folder).lines()]:
            console.print(reason, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
