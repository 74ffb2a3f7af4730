"""Free disk:  python -m harness.clean [EXPERIMENT] [--keep N] [--dry-run] [--yes]

What goes: checkpoints beyond the newest N of each run (of a run that is done, all but the newest), torn ones too, each with the
trajectories that wait in it for the trainer; the batches of trajectories that an attempt kept because it diverged, but for the
newest attempt of a run that is not done; copies of the code that nothing names any more. Nothing that a report reads is
touched: records, attempts, plans stay. It shows what would go, with sizes, and asks first; a run at work is left.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.identity import remove_snapshot
from harness.run_folder import Busy, RunFolder, hold, is_held, run_folders, scale_folders
from harness.run_status import queue_lock
from harness.slurm import job_ids
from molt_core.train.checkpoint import MARKER

EXIT_DECLINED = 3
SUBMITTED = ("queue.json", "submit.lock")
YOUNG_S = 3600.0
"""A copy of the code younger than this may be that of a submit in progress."""
TRAJECTORIES = "diverged_batch.pkl"
"""What ``molt_core.divergence`` writes into an attempt's folder."""


@dataclass(frozen=True)
class Item:
    """Something that may go: its size in bytes, and why."""

    path: Path
    size: int
    why: str

    def remove(self) -> None:
        if self.path.is_file():
            self.path.unlink()
        elif self.path.parent.name == ".code":
            remove_snapshot(self.path)
        else:
            shutil.rmtree(self.path)


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def superfluous(folder: RunFolder, keep: int) -> Iterator[Item]:
    """What of one run nobody needs any more; of one at work nothing may go, see ``remove``."""
    done = folder.done is not None
    found = sorted(path for path in (folder.path / "checkpoints").glob("step-*") if path.is_dir())
    whole = [path for path in found if (path / MARKER).exists()]
    kept = set(whole[-1:] if done else whole[-max(1, keep) :])
    for path in found:
        if path not in kept:
            why = "an older checkpoint" if path in whole else "a torn checkpoint"
            yield Item(path, size_of(path), why)
    for draft in (folder.path / "checkpoints").glob(".step-*"):
        yield Item(draft, size_of(draft), "a checkpoint that was never finished")
    for attempt in folder.attempts if done else folder.attempts[:-1]:
        if (batch := attempt / TRAJECTORIES).exists():
            yield Item(batch, size_of(batch), "trajectories of an earlier attempt")


def unnamed_code(runs: Path) -> Iterator[Item]:
    """Copies of the code below ``runs`` that no run imports and no job that may still start; none while anything is at work."""
    scales = sorted({p.parent for p in runs.glob("[!.]*/[!.]*/*") if p.name in SUBMITTED})
    if any(
        is_held(lock) for scale in scales for lock in (queue_lock(scale), scale / "submit.lock")
    ):
        return
    # A submit makes its copy first, and looks at a node before it says whose it is.
    before = time.time() - YOUNG_S
    copies = [p for p in sorted((runs / ".code").glob("[!.]*")) if p.stat().st_mtime < before]
    named: set[str] = set()
    for scale in scales:
        ids = job_ids(scale)
        for folder in run_folders(scale):
            named.add(Path(folder.run["code_path"]).name)
            script = scale / "slurm" / f"{ids.get(folder.name, '').partition('_')[0]}.sh"
            if folder.done is None and script.exists():
                text = script.read_text()
                named |= {copy.name for copy in copies if copy.name in text}
    for copy in copies:
        if copy.name not in named:
            yield Item(copy, size_of(copy), "a copy of the code that no run imports")
    for draft in (runs / ".code").glob(".draft-*"):
        yield Item(draft, size_of(draft), "a copy of the code that was never finished")


def remove(
    folders: Iterable[RunFolder], items: Iterable[Item], keep: int, runs: Path
) -> list[Item]:
    """Remove what of ``items`` may go still; returns it. A run that has started to work since they were looked for is left."""
    shown, gone = {item.path for item in items}, []
    for folder in folders:
        try:
            with hold(folder.lock):
                gone += _remove(superfluous(folder, keep), shown)
        except Busy:
            continue
    return gone + _remove(unnamed_code(runs), shown)


def _remove(items: Iterable[Item], shown: set[Path]) -> list[Item]:
    chosen = [item for item in items if item.path in shown]
    for item in chosen:
        item.remove()
    return chosen


def main(
    experiment: Annotated[str | None, typer.Argument(help="name; all where left out")] = None,
    scale: Annotated[str | None, typer.Option(help="only this scale")] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="newest checkpoints kept of unfinished runs")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show, remove nothing")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="for machines; with --yes or --dry-run, as it cannot ask")
    ] = False,
) -> None:
    """Remove old checkpoints, trajectories and copies of the code, after asking.

    Exit codes: 0 removed, or nothing to remove; 2 there is no such experiment, or --json alone; 3 declined.
    """
    if as_json and not (yes or dry_run):
        typer.echo("--json cannot ask: add --dry-run or --yes", err=True)
        raise typer.Exit(2)
    try:
        folders = [
            run for folder in scale_folders(runs, experiment, scale) for run in run_folders(folder)
        ]
    except FileNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    resting = [folder for folder in folders if not folder.is_working()]
    items = [item for folder in resting for item in superfluous(folder, keep)]
    items += unnamed_code(runs) if experiment is None and scale is None else []
    if as_json:
        found = items if dry_run else remove(resting, items, keep, runs)
        about = [{"path": str(i.path), "bytes": i.size, "why": i.why} for i in found]
        print(json.dumps({"would_go" if dry_run else "removed": about}))
        return
    if not items:
        typer.echo("Nothing to remove.")
        return
    shown = Table(box=None, pad_edge=False)
    for column in ("MB", "what", "why"):
        shown.add_column(column, justify="right" if column == "MB" else "left", overflow="fold")
    for item in items:
        shown.add_row(f"{item.size / 1e6:.1f}", str(item.path.relative_to(runs)), item.why)
    Console().print(shown)
    total = sum(item.size for item in items) / 1e9
    if dry_run:
        typer.echo(f"{total:.2f} GB would go. Dry run: nothing was removed.")
        return
    if not yes and not typer.confirm(f"Remove these {len(items)}, {total:.2f} GB?"):
        typer.echo("Nothing was removed.")
        raise typer.Exit(EXIT_DECLINED)
    gone = remove(resting, items, keep, runs)
    typer.echo(f"Removed {len(gone)}, {sum(item.size for item in gone) / 1e9:.2f} GB.")
    if len(gone) < len(items):
        typer.echo(f"{len(items) - len(gone)} are left: their runs work by now.")


if __name__ == "__main__":
    typer.run(main)
