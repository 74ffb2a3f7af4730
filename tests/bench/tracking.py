"""What tracking costs a step:  python -m tests.bench.tracking [RUN_DIR]     (default: a replicate of the demo, when done)

The records of a real run are written again, as it wrote them, and brought into MLflow as they come. Two costs, as shares of
that run's own median step: what the step waits for (its record, on disk before it goes on, and its heartbeat), and what another
process computes meanwhile (the pass over the folder that fills MLflow, every few seconds and at the lowest priority).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness.run_folder import RunFolder, write_json
from harness.sync import FOLLOW_S, QUIET, ensure_store
from molt_core.metrics import RunWriter


def written(records: list[dict], folder: Path) -> list[float]:
    """Seconds that each step waits for its tracking."""
    writer, took = RunWriter(folder, 1, len(records)), []
    for record in records:
        with contextlib.redirect_stdout(io.StringIO()):
            began = time.perf_counter()
            writer.heartbeat("training", record["step"] - 1)
            writer.record(record)
            took.append(time.perf_counter() - began)
    return took


def followed(run: dict, records: list[dict], scale: Path, a_pass: int) -> tuple[float, float]:
    """CPU seconds that a record costs the follower, at ``a_pass`` records a pass, and that a pass without news costs."""
    from harness.tracking import Tracker

    folder = RunFolder(scale / "run")
    write_json(folder.path / "run.json", run)
    write_json(scale / "queue.json", {"order": [], "work": {}})
    uri = f"sqlite:///{scale}/mlflow.db"
    ensure_store(scale, uri)
    tracker = Tracker(scale, uri)
    tracker.sync()  # makes the parent and the run, once
    began = time.process_time()
    for start in range(0, len(records), a_pass):
        with open(folder.metrics, "a") as file:
            file.writelines(json.dumps(r) + "\n" for r in records[start : start + a_pass])
        tracker.sync()
    a_record = (time.process_time() - began) / len(records)
    began = time.process_time()
    for _ in range(20):
        tracker.sync()
    return a_record, (time.process_time() - began) / 20


def main(run_dir: Path | None = None) -> None:
    os.environ |= QUIET
    found = sorted(Path("runs/moe_vl/tiny").glob("molt-s0-*/done.json"))
    if run_dir is None and not found:
        raise SystemExit(
            "no finished run under runs/moe_vl/tiny: `make demo` first, or give a run's folder"
        )
    source = RunFolder(run_dir or found[0].parent)
    lines = [json.loads(line) for line in source.metrics.read_text().splitlines()]
    records = [line for line in lines if line["step"] > 0]
    step_s = statistics.median(record["wall_s"] for record in records)
    a_pass = max(1, round(FOLLOW_S / step_s))
    with tempfile.TemporaryDirectory() as folder:
        waits = statistics.median(written(records, Path(folder) / "writer"))
        scale = Path(folder) / "runs" / "bench" / "tiny"
        cpu, idle = followed(source.run, records, scale, a_pass)
        shutil.rmtree(scale)
    fields = statistics.mean(len(record) for record in records)
    print(f"{source.name}: {len(records)} steps of {step_s:.3f} s, {fields:.0f} fields a record")
    print(f"the step waits        {1e3 * waits:7.2f} ms  {waits / step_s:7.2%} of it")
    print(
        f"MLflow, beside it     {1e3 * cpu:7.2f} ms  {cpu / step_s:7.2%} of one core, {a_pass} records a pass"
    )
    print(f"a pass without news   {1e3 * idle:7.2f} ms, every {FOLLOW_S:.0f} s")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
