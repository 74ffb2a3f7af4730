"""Plan, check and start an experiment:  python -m harness.submit experiments/moe_vl.yaml [--wait] [--dry-run]

Idempotent: what is done is not run again, what was interrupted goes on in its folder, what is new is started. On Slurm (where
``sbatch`` is found) the runs become job arrays; elsewhere, and with --local, one queue works them on this machine, in the
foreground with --wait.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from analysis.plan import Plan, PlanError, freeze
from harness import fingerprints, lock, nodes, preflight, show
from harness.avoid import last_decision
from harness.canary import with_canaries
from harness.causes import cause
from harness.cluster import Cluster, choose_cluster
from harness.container import Image, known_image
from harness.expand import Expansion, Run, expand
from harness.identity import ROOT
from harness.prepare import prepare
from harness.problems import SpecError
from harness.queue import Queue, ask, start_detached, take_over
from harness.run_folder import Busy, RunFolder, describe_holder, hold, is_held
from harness.run_status import at_work, queue_lock, read_status, read_statuses
from harness.scheduler import SlurmError, configuration
from harness.slurm import hopeless, job_ids, live, refusals, scripts, submit_arrays
from harness.spec import load
from harness.standing import standings
from harness.sync import default_uri, end_follower, start_follower

EXIT_REFUSED, EXIT_LOST, EXIT_INTERRUPTED = 2, 4, 130


def choose_scale(experiment: Any, asked: str | None, cluster: bool) -> str:
    """The scale asked for; else the one declared for machines without Slurm; else the only one. Raises ValueError."""
    scales = list(experiment.scales)
    if asked is not None:
        if asked not in scales:
            raise ValueError(f"--scale {asked}: {experiment.path} has {', '.join(scales)}")
        return asked
    if len(scales) == 1:
        return scales[0]
    if not cluster and experiment.default_scale is not None:
        return experiment.default_scale
    raise ValueError(f"give --scale: {experiment.path} has {', '.join(scales)}")


def sort_out(folder: Path, runs: Sequence[Run]) -> tuple[list[str], list[tuple[str, str]]]:
    """(names to start, [(name, why not)]) from what the folders say, and Slurm."""
    start, leave = [], []
    with_slurm = standings(folder, fresh=True)
    for run in runs:
        path = RunFolder(folder / run.name)
        if not (path.path / "run.json").exists():
            start.append(run.name)
            continue
        status = read_status(path, standing=with_slurm.get(run.name))
        why = f"{status.state}{f': {status.why}' if status.why else ''}"
        if status.state == "PLANNED" or cause(status.state).kind == "interrupted":
            start.append(run.name)
        elif cause(status.state).kind == "accident":
            leave.append((run.name, f"{why} (python -m harness.retry goes on with it)"))
        else:
            leave.append((run.name, why))
    return start, leave


def submit(
    expansion: Expansion, runs: Sequence[Run], here: bool = False
) -> tuple[list[str], list[tuple[str, str]]]:
    """Freeze the plan, write the folders, ask for the runs. Returns what ``sort_out`` does. Raises PlanError.

    ``here``: this machine's queue is to start them, whatever Slurm did with them before.

    One submit at a time works on a folder: a second waits, and then finds what the first has planned and asked for.
    """
    commit = fingerprints.commit(ROOT)
    with hold(expansion.folder / "submit.lock", wait=True):
        freeze(expansion.plan(), expansion.folder / "plan.json")
        lock.write(expansion, commit)
        start, leave = sort_out(expansion.folder, runs)
        changed = {run.name for run in runs if prepare(expansion, run, commit)}
        if here:
            take_over(expansion.folder, start)
        ask(expansion.folder, [run.name for run in expansion.runs], start)
    note = "; its changed limits count from its next attempt"
    return start, [(n, f"{why}{note}" if n in changed else why) for n, why in leave]


def changes(expansion: Expansion) -> list[str]:
    """Keys in which this plan differs from the frozen one; [] where none is frozen yet. Raises PlanError."""
    path = expansion.folder / "plan.json"
    if not path.exists():
        return []
    before, now = Plan.load(path).content(), expansion.plan().content()
    return sorted(key for key in {*before, *now} if before.get(key) != now.get(key))


def main(
    file: Annotated[Path, typer.Argument(help="the experiment, a YAML file")],
    scale: Annotated[str | None, typer.Option(help="which of its scales")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="stay, show progress, end with the runs")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show everything, start and write nothing")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="runs whose name contains this, and what they need")
    ] = None,
    canary: Annotated[
        bool, typer.Option("--canary", help="a short run of each arm first; the rest waits for it")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="profile of the Slurm cluster (slurm/clusters)")
    ] = None,
    look: Annotated[
        bool, typer.Option(help="ask a compute node first whether it has all that is needed")
    ] = True,
    local: Annotated[
        bool, typer.Option("--local", help="work the runs here, also where there is Slurm")
    ] = False,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    tracking_uri: Annotated[
        str | None, typer.Option(help="MLflow store; default: mlflow.db beside the runs")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="for machines: one object on stdout, all else on stderr")
    ] = False,
) -> None:
    """Run an experiment: every system with every seed, each once.

    Submitting again goes on where it stopped: what is done is not run again,
    limits follow the newest submit, and an edit of code or protocol makes new
    runs. Runs are independent: one that fails stops no other but those that
    need it.

    Exit codes: 0 submitted, or with --wait every run is done; 2 refused,
    nothing was started; 4 with --wait, a run is not done; 130 stopped by
    Ctrl-C, and the same command goes on from there.
    """
    console = Console(stderr=as_json)
    on_slurm = shutil.which("sbatch") is not None and not local
    try:
        experiment = load(file, base=Path.cwd())
        target = choose_target(cluster, on_slurm, dry_run)
        name = choose_scale(experiment, scale, on_slurm)
        image, obstacles = image_of(target, runs, dry_run)
        expansion = expand(
            experiment,
            name,
            runs,
            base=Path.cwd(),
            paths=(target or choose_cluster(None)).paths,
            write=not dry_run,
            image=image,
        )
        if canary:
            expansion = with_canaries(expansion)
        chosen = expansion.select(only)
        changed = changes(expansion)
    except (SpecError, ValidationError, ValueError, PlanError, SlurmError) as error:
        refuse(console, str(error).splitlines(), as_json)
        raise typer.Exit(EXIT_REFUSED) from error
    obstacles += preflight.problems(expansion, cluster=on_slurm)
    if on_slurm and not obstacles:
        try:
            obstacles = refusals(expansion.folder, chosen, target)
        except SlurmError as error:
            obstacles = [f"Slurm does not answer: {error}; try again when it does"]
    if dry_run:
        show.dry_run(console, expansion, chosen, obstacles, changed)
        texts = [] if target is None else scripts(expansion.folder, chosen, target)
        show.scripts(console, texts)
        if as_json:
            print(json.dumps(show.as_data(expansion, chosen, obstacles) | {"sbatch": dict(texts)}))
        return
    if obstacles:
        refuse(
            console, [*(f"- {obstacle}" for obstacle in obstacles), "Nothing was started."], as_json
        )
        raise typer.Exit(EXIT_REFUSED)
    if on_slurm and look and sort_out(expansion.folder, chosen)[0]:
        look_at_a_node(console, expansion, chosen, target, as_json)
    start, leave = submit(expansion, chosen, here=not on_slurm)
    show.submitted(console, expansion, start, leave, changed)
    told = {"folder": str(expansion.folder), "start": start, "leave": dict(leave)}
    uri = tracking_uri or default_uri(runs)
    try:
        if on_slurm:
            code = run_on_slurm(console, expansion, start, wait, uri, target)
        else:
            code = run_here(console, expansion, start, wait, uri)
    except SlurmError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        told["error"], code = str(error), EXIT_REFUSED
    if as_json:
        ids = job_ids(expansion.folder)
        print(json.dumps(told | {"jobs": {name: ids[name] for name in start if name in ids}}))
    raise typer.Exit(code)


def look_at_a_node(
    console: Console, expansion: Expansion, runs: Sequence[Run], cluster: Cluster, as_json: bool
) -> None:
    """Refuse what a compute node lacks; where none answers, say so and go on."""
    console.print("Looking from a compute node ... (--no-look leaves it out)", highlight=False)
    try:
        sight = nodes.look(expansion, runs, cluster)
    except SlurmError as error:
        sight = nodes.Sight(unchecked=str(error))
    if sight.problems:
        lines = [*(f"- {problem}" for problem in sight.problems), "Nothing was started."]
        refuse(console, lines, as_json)
        raise typer.Exit(EXIT_REFUSED)
    if sight.unchecked:
        said = (
            f"Not checked: paths, disk, image and packages as compute nodes see them; {sight.unchecked}. The runs are "
            "queued all the same; to look first, cancel them and submit again."
        )
        console.print(said, style="yellow", highlight=False)


def refuse(console: Console, lines: Sequence[str], as_json: bool) -> None:
    """Say why nothing was started."""
    for line in lines:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"refused": list(lines)}))


def run_here(console: Console, expansion: Expansion, start: list[str], wait: bool, uri: str) -> int:
    """The queue of this machine, in the foreground or detached. Returns the exit code."""
    folder, lock = expansion.folder, queue_lock(expansion.folder)
    if start and not wait and not is_held(lock):
        pid = start_detached(folder, uri)
        console.print(f"A queue works them in the background (process {pid}).")
    if not wait:
        if is_held(lock):
            console.print(f"A queue works here already ({describe_holder(lock)}).")
        console.print(f"Watch: python -m harness.status {expansion.experiment.name}")
        return 0
    if start or is_held(lock):
        queue = Queue(folder, uri)
        with show.board(console, folder) as draw:
            try:
                queue.work(draw)
            except Busy as error:
                console.print(f"Following: {error}. Ctrl-C ends the watching only.")
                show.follow(lambda: is_held(lock), draw)
        if queue.sync_failed:
            console.print(_behind(folder))
        if queue.stopping:
            console.print("Stopped. Nothing is lost: the same command goes on from here.")
            return EXIT_INTERRUPTED
    return settle(console, expansion)


def _behind(folder: Path) -> str:
    return f"MLflow is behind: see {folder}/sync.log; python -m harness.sync mends it."


def choose_target(asked: str | None, on_slurm: bool, dry_run: bool) -> Cluster | None:
    """The profile of the cluster that is here, or was asked for in a dry run elsewhere. Raises SpecError, ValueError."""
    if on_slurm:
        return choose_cluster(asked, configuration().get("ClusterName"))
    if asked is not None and not dry_run:
        raise ValueError(f"--cluster {asked}: there is no sbatch here; submit where the cluster is")
    return choose_cluster(asked) if asked is not None else None


def image_of(target: Cluster | None, runs: Path, dry_run: bool) -> tuple[Image | None, list[str]]:
    """The image of runs sent to ``target``, and what it means where a dry run cannot see its file. Raises ValueError."""
    if target is None:
        return None, []
    try:
        return known_image(target.container, runs, not dry_run), []
    except ValueError as error:
        if not dry_run:
            raise
        return None, [f"{error}; the identities shown are those of runs without an image"]


def run_on_slurm(
    console: Console,
    expansion: Expansion,
    start: list[str],
    wait: bool,
    uri: str,
    cluster: Cluster,
) -> int:
    """Job arrays for what no job of Slurm has yet. Returns the exit code."""
    folder = expansion.folder
    with hold(folder / "submit.lock", wait=True):  # or two submits would give a run two jobs
        queued = live(folder, fresh=True)
        # While this waited for the lock, another submit's runs may have come to an outcome, which stands.
        still, since = sort_out(folder, [run for run in expansion.runs if run.name in start])
        runs = [r for r in expansion.runs if r.name in still and r.name not in queued]
        lacking = hopeless(folder, runs, queued)
        names = [run.name for run in runs if run.name not in lacking]
        ids = submit_arrays(folder, [run for run in runs if run.name in names], cluster)
    for name, why in since:
        if name not in queued:
            console.print(f"  {name} is left: {why}", markup=False, highlight=False)
    for name, need in lacking.items():
        console.print(f"  {name} is not sent: it needs {need}, which is not done", highlight=False)
    sent: dict[str, list[str]] = {}
    for name in names:
        sent.setdefault(ids[name].partition("_")[0], []).append(name)
    for job_id, array in sent.items():
        console.print(f"  job {job_id}: {show.some(array)}", highlight=False)
    for line in last_decision(folder).lines():
        console.print(f"  {line}", markup=False, highlight=False)
    if queued:
        console.print(f"{len(queued)} runs are with Slurm already.")
    if not wait:
        name = expansion.experiment.name
        console.print(f"Watch: python -m harness.status {name}")
        console.print(f"MLflow follows while this runs: python -m harness.sync {name} --follow")
        return 0
    follower = start_follower(folder, uri)
    try:
        with show.board(console, folder) as draw:
            show.follow(lambda: at_work(folder), draw)
    except KeyboardInterrupt:
        console.print("The jobs go on; python -m harness.cancel stops them.")
        return EXIT_INTERRUPTED
    finally:
        if end_follower(follower):
            console.print(_behind(folder))
    return settle(console, expansion)


def settle(console: Console, expansion: Expansion) -> int:
    """The table at the end; exit code 0 where every run of this submit is done."""
    statuses = read_statuses(expansion.folder)
    show.ended(console, expansion, statuses)
    wanted = {run.name for run in expansion.runs}
    return EXIT_LOST if any(s.state != "DONE" for s in statuses if s.run in wanted) else 0


if __name__ == "__main__":
    typer.run(main)
