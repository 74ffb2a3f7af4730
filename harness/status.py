"""What every run is doing:  python -m harness.status [EXPERIMENT] [--scale S] [--runs DIR] [--watch] [--json]

What the states mean, and whom they are asked of: ``harness/run_status.py``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.avoid import last_decision
from harness.run_folder import scale_folders
from harness.run_status import read_statuses
from harness.show import watch_all
from harness.table import reasons, table


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
