"""What a thousand runs cost the harness:  OMP_NUM_THREADS=1 python -m tests.bench.submit [RUNS] [--step-s SECONDS]

The demo's experiment with so many seeds is read, expanded, hashed, checked and submitted to this machine's queue file (nothing
is started), submitted again, and looked at. Then what a step pays for its record, and what MLflow's view of it costs beside it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import preflight
from harness.expand import expand
from harness.processes import own_environment
from harness.run_folder import RunFolder, write_json
from harness.run_status import read_statuses
from harness.spec import load
from harness.submit import submit
from harness.sync import ensure_store

ROOT = Path(__file__).resolve().parents[2]
SEEDS = "seeds: [0, 1, 2]"
STEPS = 2000
"""Steps over which the cost of a record is averaged."""
FIELDS = {f"field_{number}": number / 7 for number in range(60)}
"""As many numbers as a training record holds."""


class Clock:
    """Seconds and this process's peak memory in MB, by name."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.rows.append((name, time.perf_counter() - started, peak_mb()))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def experiment_file(folder: Path, runs: int) -> Path:
    """The demo's experiment with ``runs`` replicates."""
    text = (ROOT / "experiments" / "moe_vl.yaml").read_text()
    if SEEDS not in text:
        raise ValueError(f"experiments/moe_vl.yaml no longer has {SEEDS!r}: mend this bench")
    path = folder / "moe_vl.yaml"
    path.write_text(text.replace(SEEDS, f"seeds: {list(range(runs // 2))}", 1))
    return path


def many_runs(folder: Path, runs: int, clock: Clock) -> Path:
    """Submit; returns the folder of the scale."""
    path = experiment_file(folder, runs)
    with clock.time("read and check the file"):
        experiment = load(path, base=ROOT)
    with clock.time("expand, hash, copy the code"):
        expansion = expand(experiment, "tiny", folder / "runs", base=ROOT)
    with clock.time("preflight"):
        preflight.problems(expansion, cluster=False)
    with clock.time("submit: plan, folders, queue"):
        start, _ = submit(expansion, expansion.runs)
    with clock.time("submit again"):
        submit(expansion, expansion.runs)
    with clock.time("status, nothing started"):
        read_statuses(expansion.folder)
    for name in start:
        run = RunFolder(expansion.folder / name)
        attempt = run.path / "attempts" / "01"
        write_json(attempt / "start.json", {"time": 0.0, "host": "here"})
        write_json(attempt / "end.json", {"state": "DONE", "reason": "DONE", "duration_s": 1.0})
        write_json(run.path / "done.json", {"attempt": 1, "finished": 1.0, "summary": {}})
    with clock.time("status, all done"):
        read_statuses(expansion.folder)
    with clock.time("python -m harness.status --json"):
        command = [sys.executable, "-m", "harness.status", "--json", "--runs", folder / "runs"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=own_environment())
    return expansion.folder


def record_s(folder: Path) -> float:
    """Seconds a step for its line in metrics.jsonl and its heartbeat."""
    from molt_core.metrics import RunWriter  # torch, which no verb of the harness imports

    writer = RunWriter(folder / "run", attempt=1, steps=STEPS)
    started = time.perf_counter()
    for step in range(1, STEPS + 1):
        writer.heartbeat("training", step - 1)
        writer.record({"step": step, **FIELDS})
    return (time.perf_counter() - started) / STEPS


def mirror_s(folder: Path) -> float:
    """Seconds of work a step for MLflow's copy, in a process of its own at the lowest priority."""
    from harness.tracking import Tracker  # MLflow takes seconds to import

    runs = folder / "runs"
    uri = f"sqlite:///{folder}/mlflow.db"
    ensure_store(runs, uri)
    scale = next(runs.glob("[!.]*/tiny"))
    run = next(path for path in scale.glob("molt-s0-*"))
    tracker = Tracker(scale, uri)
    tracker.sync()
    (folder / "run" / "metrics.jsonl").rename(run / "metrics.jsonl")
    started = time.process_time()
    written = tracker.sync()
    return (time.process_time() - started) / written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.submit", description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=1000)
    parser.add_argument("--step-s", type=float, default=0.37, help="a demo step, for the share")
    options = parser.parse_args()
    console, clock = Console(), Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = peak_mb()
        many_runs(folder, options.runs, clock)
        table = Table(title=f"{options.runs} runs", title_justify="left")
        for column in ("", "seconds", "ms a run", "peak MB"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("imports", "", "", f"{before:.0f}")
        for what, seconds, memory in clock.rows:
            table.add_row(
                what, f"{seconds:.2f}", f"{1000 * seconds / options.runs:.2f}", f"{memory:.0f}"
            )
        console.print(table)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expansion = expand(load(experiment_file(folder, 2)), "tiny", folder / "runs", base=ROOT)
        submit(expansion, expansion.runs)
        record = record_s(folder)
        mirror = mirror_s(folder)
    for what, seconds in (("record and heartbeat", record), ("MLflow, beside it", mirror)):
        share = seconds / options.step_s
        console.print(f"{what}: {1000 * seconds:.2f} ms a step, {share:.2%} of {options.step_s} s")


if __name__ == "__main__":
    main()
