"""What an experiment has cost:  python -m harness.gpu_hours [EXPERIMENT] [--scale S]

Device hours by arm, and where they went: steps that stand (in the record, and not done again later), steps done again after an
interruption, and the rest (start-up, saving, evaluation outside a step, attempts that recorded nothing). Hours come from
Slurm's accounting, requeues included; without it, from the attempts themselves. A run without devices counts CPU hours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.requeue import job_of
from harness.run_folder import RunFolder, read_json, run_folders, scale_folders, tail_records
from harness.scheduler import SlurmError, ask_slurm


@dataclass(frozen=True)
class Cost:
    """Device hours of an arm; ``stands`` + ``again`` + ``rest`` = ``total``."""

    system: str
    unit: str
    runs: int
    attempts: int
    total: float
    stands: float
    again: float
    source: str

    @property
    def rest(self) -> float:
        return self.total - self.stands - self.again


def allocations(ids: Iterable[str]) -> dict[str, tuple[float, int, int]]:
    """Job id -> (seconds over all its requeues, GPUs, CPUs), from sacct; {} where nothing is accounted for."""
    arrays = sorted({job_id.partition("_")[0] for job_id in ids}, key=int)
    if not arrays:
        return {}
    columns = "--format=JobID,ElapsedRaw,AllocTRES"
    command = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2", columns]
    try:
        return parse_allocations(ask_slurm(*command, f"--jobs={','.join(arrays)}"))
    except (SlurmError, FileNotFoundError):
        return {}  # no accounting here; the attempts know their own times


def parse_allocations(text: str) -> dict[str, tuple[float, int, int]]:
    """Lines of ``JobID|ElapsedRaw|AllocTRES``; a job that was requeued has several."""
    found: dict[str, tuple[float, int, int]] = {}
    for line in text.splitlines():
        job_id, elapsed, resources = line.split("|", 2)
        gpus = re.search(r"gres/gpu=(\d+)", resources)
        cpus = re.search(r"\bcpu=(\d+)", resources)
        before = found.get(job_id, (0.0, 0, 0))
        found[job_id] = (
            before[0] + float(elapsed or 0),
            max(before[1], int(gpus.group(1)) if gpus else 0),
            max(before[2], int(cpus.group(1)) if cpus else 0),
        )
    return found


def split_steps(metrics: Path) -> tuple[float, float]:
    """(seconds of steps that stand, seconds of steps that a later attempt did again)."""
    standing: dict[int, tuple[int, float]] = {}
    again = 0.0
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        record = json.loads(line)
        if "wall_s" not in record:
            continue
        step = record["step"]
        if step in standing:
            again += standing[step][1]
        standing[step] = (record.get("attempt", 1), record["wall_s"])
    return sum(wall for _, wall in standing.values()), again


def costs(scale_folder: Path) -> list[Cost]:
    """One row an arm, warm-up and conformance among them, in the order of names."""
    by_system: dict[str, list[RunFolder]] = {}
    for folder in run_folders(scale_folder):
        by_system.setdefault(folder.run["system"], []).append(folder)
    ids = {job for runs in by_system.values() for run in runs for job in _attempts(run)} - {None}
    accounted = allocations(ids)
    return [_cost(system, runs, accounted) for system, runs in sorted(by_system.items())]


def _attempts(folder: RunFolder) -> dict[str | None, list[Path]]:
    """The run's attempts by their job of Slurm, None for those of a machine's own queue."""
    found: dict[str | None, list[Path]] = {}
    for attempt in folder.attempts:
        found.setdefault(job_of(read_json(attempt / "start.json") or {}), []).append(attempt)
    return found


def _took_s(folder: RunFolder, attempt: Path) -> float:
    """By its own account; of one that has none yet, or left none, up to the last sign of life."""
    end = read_json(attempt / "end.json")
    if end is not None:
        return end.get("duration_s", 0.0)
    start = (read_json(attempt / "start.json") or {}).get("time")
    records = tail_records(folder.metrics, 1)
    signs = [(folder.heartbeat or {}).get("time_unix"), *(r.get("time_unix") for r in records)]
    return max([0.0, *(sign - start for sign in signs if sign and start)])


def _cost(system: str, runs: list[RunFolder], accounted: dict[str, tuple[float, int, int]]) -> Cost:
    total = stands = again = 0.0
    unit, source, attempts = "CPU h", "attempts", 0
    for folder in runs:
        asked = folder.run["resources"]
        nodes = asked.get("nodes", 1)
        devices = nodes * asked.get("devices_per_node", 0)
        seconds, gpus, cpus = 0.0, 0, 0
        for job, attempts_of_job in _attempts(folder).items():
            if job in accounted:
                elapsed, job_gpus, job_cpus = accounted[job]
                seconds, gpus, cpus = seconds + elapsed, max(gpus, job_gpus), max(cpus, job_cpus)
                source = "sacct"
            else:
                seconds += sum(_took_s(folder, attempt) for attempt in attempts_of_job)
        unit = "GPU h" if gpus or devices else "CPU h"
        width = gpus or devices or cpus or nodes * asked.get("cpus_per_node", 1)
        kept, repeated = split_steps(folder.metrics)
        total += seconds * width / 3600
        stands += kept * width / 3600
        again += repeated * width / 3600
        attempts += len(folder.attempts)
    return Cost(system, unit, len(runs), attempts, total, stands, again, source)


def table(rows: list[Cost], title: str) -> Table:
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in (
        "arm",
        "runs",
        "attempts",
        "hours",
        "stand",
        "again",
        "rest",
        "",
    ):
        shown.add_column(column, justify="left" if column in ("arm", "") else "right", no_wrap=True)
    for row in rows:
        parts = (row.total, row.stands, row.again, row.rest)
        shown.add_row(
            row.system,
            str(row.runs),
            str(row.attempts),
            *(f"{value:.2f}" for value in parts),
            f"{row.unit}, {row.source}",
        )
    return shown


def main(
    experiment: Annotated[str | None, typer.Argument(help="name; all where left out")] = None,
    scale: Annotated[str | None, typer.Option(help="only this scale")] = None,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="for machines, on stdout")] = False,
) -> None:
    """Device hours by arm, and how many of them were lost work.

    Exit codes: 0 shown; 2 there is no such experiment.
    """
    try:
        folders = scale_folders(runs, experiment, scale)
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    found = {f"{folder.parent.name}/{folder.name}": costs(folder) for folder in folders}
    if as_json:
        rows = {n: [asdict(c) | {"rest": c.rest} for c in all_] for n, all_ in found.items()}
        print(json.dumps(rows))
        return
    for name, rows in found.items():
        Console().print(table(rows, name))


if __name__ == "__main__":
    typer.run(main)
