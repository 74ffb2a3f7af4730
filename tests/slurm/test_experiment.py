"""The demo's experiment, shortened, on Slurm: real engine, real trainers; to its end, and with a part of it killed."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
import yaml

from harness.identity import ROOT
from harness.processes import leftovers
from harness.run_folder import RunFolder, read_json, run_folders
from tests.slurm.conftest import run, wait_until

SUBMIT = [sys.executable, "-m", "harness.submit"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of all runs here: one warm-up is enough."""
    return tmp_path_factory.mktemp("experiment")


def short(file: Path, steps: int, **changed: object) -> Path:
    """The experiment with few steps, as ``file``."""
    made = yaml.safe_load((ROOT / "experiments" / "moe_vl.yaml").read_text())
    made.pop("noise_floor", None)  # runs beside the replicates
    made["protocol"]["warmup"]["steps"] = 3
    made["protocol"]["loop"]["steps"] = steps
    made["protocol"]["evaluation"]["every"] = steps
    # One run at a time fits a machine of two cores; what Slurm believes of its nodes is another matter.
    made["scales"]["tiny"]["resources"]["cpus_per_node"] = 16
    made["scales"] = {"tiny": made["scales"]["tiny"]}
    file.write_text(yaml.safe_dump(made | changed))
    return file


@pytest.mark.engine
def test_a_matched_experiment_is_done_on_slurm(folder):
    file = short(folder / "short.yaml", 2, seeds=[0])
    said = run(*SUBMIT, file, "--cluster", "local", "--wait", "--runs", folder / "runs")
    folders = run_folders(folder / "runs" / "moe_vl" / "tiny")
    assert [made.name for made in folders if made.done is None] == [], said
    assert len(folders) == 4  # warm-up, conformance, two arms
    starts = [read_json(made.attempts[0] / "start.json") for made in folders]
    assert all(start["slurm_array_job_id"] for start in starts)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("part", "seed", "state", "named"),
    [
        ("VLLM::EngineCore", 0, "ENGINE", "the engine's own process is dead"),
        ("ray::TrainerRank", 1, "WORKER_DIED", "TrainerRank"),
    ],
)
def test_a_run_with_a_dead_part_ends_at_once_and_names_it(folder, part, seed, state, named):
    """kill -9 of the engine's process, and of one of two trainer ranks, whose neighbour then waits in a collective."""
    arms = {
        "pair": {"role": "baseline", "trainer": {"backend": "fsdp2", "world_size": 2}},
        "one": {"role": "candidate", "trainer": {"backend": "fsdp2"}},
    }
    file = short(folder / "long.yaml", 500, name="dead_part", seeds=[0, 1], systems=arms)
    where = ["--cluster", "local", "--no-look", "--runs", folder / "runs"]
    run(*SUBMIT, file, *where, "--only", f"pair-s{seed}")
    (path,) = (folder / "runs" / "dead_part" / "tiny").glob(f"pair-s{seed}-*")
    made = RunFolder(path)
    wait_until(lambda: (made.heartbeat or {}).get("step", 0) >= 2, 240)
    alive = leftovers(made.mark)
    begun = {int(file.stem) for file in (made.attempts[-1] / "stacks").glob("*.txt")}
    for name in ("molt_core.train", "ray::TrainerRank", "ray::RolloutWorker", "VLLM::EngineCore"):
        pids = {own_pid(process) for process in alive if name in name_of(process)}
        assert pids and pids <= begun, f"{name} did not look whether it has the run's own code"
    victim = next(process for process in alive if part in name_of(process))
    victim.kill()
    wait_until(lambda: made.end, 60)
    assert made.end["state"] == state and named in made.end["reason"]
    assert leftovers(made.mark) == []


def own_pid(process: psutil.Process) -> int:
    """The number that it has on its own node."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("NSpid:")).split()[-1])


def name_of(process: psutil.Process) -> str:
    """What a process calls itself."""
    return " ".join(process.cmdline())
