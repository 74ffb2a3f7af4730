"""Run folders whose command is a few lines of Python, for tests of what starts and watches commands."""

from __future__ import annotations

import os
import sys

import pytest

from harness.cores import POOL_ENV
from harness.run_folder import RunFolder, write_json

STAND_IN = """
import json, os, sys, time
from pathlib import Path
run, attempt, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def beat(phase, step):
    draft = run / "heartbeat.tmp"
    draft.write_text(json.dumps({"phase": phase, "step": step, "steps": steps, "time_unix": time.time()}))
    os.replace(draft, run / "heartbeat.json")
def record(step, **fields):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "attempt": attempt, "time_unix": time.time(), **fields}) + "\\n")
"""
"""What the stand-ins begin with: they keep a run's record as ``molt_core.train`` does."""

TRAIN = """
for step in range(1, steps + 1):
    record(step, wall_s=0.01, reward_mean=step / steps)
    beat("training", step)
"""


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, body, kind=..., needs=..., steps=..., resources=...) -> RunFolder with that command."""
    scale = tmp_path / "runs" / "experiment" / "tiny"
    code = tmp_path / "code"
    code.mkdir()

    def make(
        name: str = "molt-s0-00000000",
        body: str = TRAIN,
        *,
        kind: str = "train",
        needs: tuple[str, ...] = (),
        steps: int = 3,
        **resources,
    ) -> RunFolder:
        folder = RunFolder(scale / name)
        script = tmp_path / f"{name}.py"
        script.write_text(STAND_IN + body)
        limits = {"cpus_per_node": 1, "time_limit_s": 60, "hang_after_s": 60, **resources}
        write_json(
            folder.path / "run.json",
            {
                "experiment": "experiment",
                "scale": "tiny",
                "kind": kind,
                "system": name.partition("-")[0],
                "role": "candidate",
                "seed": 0,
                "identity": f"test-{os.getpid()}-{tmp_path.name}-{name}",
                "needs": list(needs),
                "command": ["{python}", str(script), "{run}", "{attempt}", str(steps)],
                "code_path": os.path.relpath(code, folder.path),
                "resources": limits,
                "config": {"loop": {"steps": steps}},
                "fingerprints": {"code": "0" * 64},
            },
        )
        return folder

    return make


@pytest.fixture
def job_command():
    """The command line of a job, as the queue starts it."""
    return lambda folder: [sys.executable, "-m", "harness.job", str(folder.path)]


@pytest.fixture
def own_cores(monkeypatch, tmp_path):
    """A machine of one's own: tests do not wait for the cores that another queue holds."""
    monkeypatch.setenv(POOL_ENV, f"test-{os.getpid()}-{tmp_path.name}")


@pytest.fixture(scope="module")
def one_megatron_rank(one_rank):
    """The process group of one, and Megatron-Core's own groups taken down with it."""
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()
