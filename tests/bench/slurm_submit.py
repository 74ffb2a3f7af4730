"""What a submit of 1,000 runs costs:  python -m tests.bench.slurm_submit   (on the Slurm of `make slurm-local`)

Each stage of a submit, the status of all runs, and a bare sbatch array of the same size. The jobs are held, then cancelled:
what is timed is the harness and the controller, not the runs.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import scheduler
from harness.cluster import PROFILES, load_cluster
from harness.expand import expand
from harness.identity import ROOT
from harness.run_status import read_statuses
from harness.scheduler import ask_slurm
from harness.slurm import cancel_jobs, refusals, submit_arrays
from harness.spec import load
from harness.submit import submit
from slurm.local import cluster

RUNS = 1000


def timed(what: str, call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = call()
    print(f"{what:<44}{time.perf_counter() - began:8.2f} s", flush=True)
    return result


def main() -> None:
    if not cluster.running():
        raise SystemExit("NOT RUN: no Slurm here; start one by `make slurm-local`")
    os.environ |= {key: cluster.environment()[key] for key in ("SLURM_CONF", "PATH")}
    held = load_cluster(PROFILES / "local.yaml").model_copy(update={"sbatch": {"hold": True}})
    text = (ROOT / "experiments" / "moe_vl.yaml").read_text()
    seeds = f"seeds: {list(range(RUNS // 2))}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "many.yaml"
        file.write_text(text.replace("seeds: [0, 1, 2]", seeds, 1))
        experiment = timed("read and check the experiment", lambda: load(file))
        made = timed(
            f"expand and hash {RUNS} runs",
            lambda: expand(experiment, "tiny", Path(folder) / "runs", base=ROOT),
        )
        assert len(made.replicates) == RUNS
        runs = made.runs
        said = timed("preflight by Slurm", lambda: refusals(made.folder, runs, held))
        assert not said, said
        timed("plan, lock and folders", lambda: submit(made, runs))
        timed("sbatch of all arrays", lambda: submit_arrays(made.folder, runs, held))
        timed("submit again: nothing to do", lambda: submit(made, runs))
        statuses = timed("status, first look", lambda: read_statuses(made.folder))
        assert {status.state for status in statuses} == {"WAITING"}
        timed("status, second look (scheduler cached)", lambda: read_statuses(made.folder))
        timed("cancel all", lambda: cancel_jobs(made.folder, [run.name for run in runs]))
        bare = f"#!/bin/sh\n#SBATCH --array=0-{RUNS - 1} --hold --output=/dev/null\ntrue\n"
        job = timed(
            "a bare sbatch array of the same size",
            lambda: ask_slurm("sbatch", "--parsable", input=bare),
        )
        ask_slurm("scancel", job.strip())
        scheduler.forget()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'peak memory':<44}{peak:8.0f} MB")


if __name__ == "__main__":
    main()
