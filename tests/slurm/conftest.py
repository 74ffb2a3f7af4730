"""Tests on a real Slurm: the one that ``make slurm-local`` starts. Where it does not run, they are NOT RUN, in a loud line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from harness import prepare, scheduler
from harness.cluster import PROFILES, Cluster, Container, load_cluster
from harness.container import Image, known_image
from harness.expand import expand
from harness.run_folder import RunFolder
from harness.run_status import read_statuses
from harness.slurm import submit_arrays
from harness.spec import load
from harness.submit import submit
from harness.sync import ensure_store
from harness.tracking import Tracker
from slurm.local import cluster
from tests.harness.conftest import STAND_IN, TRAIN
from tests.harness.test_spec import write

NO_SLURM = "No Slurm: start one by `make slurm-local`, then `make test-slurm`"
HERE = Path(__file__).parent
LOCAL = load_cluster(PROFILES / "local.yaml")
TOKEN = "a-token-of-the-shell-that-submits"


def pytest_collection_modifyitems(items):
    if not cluster.running():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=NO_SLURM))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    why = [report.longrepr[2] for report in skipped if "tests/slurm" in report.nodeid]
    for reason, count in Counter(why).items():
        said = f"NOT RUN: {count} tests of tests/slurm. {reason}"
        terminalreporter.write_line(said, red=True, bold=True)


@pytest.fixture(autouse=True)
def on_the_cluster(monkeypatch):
    """This process's commands are those of the local cluster."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment()[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*command: str | Path) -> str:
    """What a command says. Raises CalledProcessError where it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def wait_until(condition, patience_s: float = 30):
    """The first true value of ``condition``. Fails the test after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not after {patience_s} s: {condition}"
        time.sleep(0.2)
    return value


BODIES = {
    "warmup": """
(run / "checkpoint").mkdir(exist_ok=True)
(run / "checkpoint" / "warmup.json").write_text(json.dumps({"content_hash": "c0ffee"}))
""",
    "conformance": '(run / "conformance.json").write_text(json.dumps({"passed": True}))',
    "train": TRAIN,
}


@pytest.fixture
def light(tmp_path, monkeypatch):
    """light(train=..., seeds=..., resources=...) -> Expansion of a small experiment whose commands are a few lines of Python.

    Everything but what the command does is real: folders, snapshot, arrays, jobs.
    """

    def make(
        train: str = TRAIN,
        seeds: str = "[0, 1]",
        resources: str = "",
        limit: str = "00:30:00",
        cpus: int = 1,
        protocol: str = "",
        runs: Path = tmp_path / "runs",
        image: Image | None = None,
    ):
        bodies = BODIES | {"train": train}
        for kind, body in bodies.items():
            (tmp_path / f"{kind}.py").write_text(STAND_IN + body)

        def command(expansion, run):
            script = tmp_path / f"{run.kind if run.kind in bodies else 'train'}.py"
            return ["{python}", str(script), "{run}", "{attempt}", str(run.config.loop.steps)]

        monkeypatch.setattr(prepare, "command", command)
        changed = f"{{cpus_per_node: {cpus}, time_limit: {limit}{resources}}}"
        path = write(tmp_path, "resources: {time_limit: 00:30:00}", f"resources: {changed}")
        path.write_text(path.read_text().replace("seeds: [0, 1]", f"seeds: {seeds}\n", 1))
        text = path.read_text().replace(
            "  optimizer:", f"  loop: {{steps: 5}}\n{protocol}  optimizer:", 1
        )
        path.write_text(text)
        return expand(load(path), "here", runs, base=tmp_path, image=image)

    return make


@pytest.fixture
def boxed(light, tmp_path, monkeypatch):
    """boxed(runtime, train=...) -> (Expansion, profile): the light experiment in an image of this machine's own folders."""

    def make(runtime: str, train: str, **options):
        monkeypatch.setenv("LAB_TOKEN", TOKEN)
        shims = tmp_path / "shims"
        shims.mkdir()
        for name in ("apptainer", "srun"):
            made_of = f"{sys.executable} {Path(__file__).parent}/runtimes.py {cluster.BIN} {name}"
            (shims / name).write_text(f'#!/bin/sh\nexec {made_of} "$@"\n')
            (shims / name).chmod(0o755)
        inside = [Path("/usr"), Path("/etc"), Path(sys.base_prefix), Path(sys.prefix).resolve()]
        (tmp_path / "image").write_text("\n".join(map(str, dict.fromkeys(inside))))
        (tmp_path / "data").write_text("rows")
        (tmp_path / "secret").write_text("of the host")
        scripts = [f"{tmp_path / kind}.py:{tmp_path / kind}.py:ro" for kind in BODIES]
        box = Container(
            runtime=runtime,
            image=str(tmp_path / "image"),
            mounts=(f"{tmp_path}/data:/data:ro", *scripts),
            python=str(Path(sys.prefix).resolve() / "bin" / "python"),
        )
        given = {"GREETING": "two words", "LAB_TOKEN": None}
        own = {"container": box, "environment": given}
        first = (f'export PATH={shims}:"$PATH"',)
        profile = LOCAL.model_copy(update={**own, "setup": first})
        image = known_image(box, tmp_path / "runs")
        train = train.replace("SECRET", repr(str(tmp_path / "secret"))).replace("DATA", '"/data"')
        return light(train=train, seeds="[0]", image=image, **options), profile

    return make


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    """A database of MLflow's, which takes seconds to make; each test has a copy."""
    folder = tmp_path_factory.mktemp("store")
    ensure_store(folder, f"sqlite:///{folder}/mlflow.db")
    return folder / "mlflow.db"


@pytest.fixture
def mlflow_says(empty_store, tmp_path):
    """mlflow_says(run folder) -> the status of its one MLflow run, after a pass of `harness.sync`."""
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"

    def says(folder: RunFolder) -> str:
        scheduler.forget()
        Tracker(folder.path.parent, uri).sync()
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name(folder.path.parents[1].name)
        wanted = f"tags.identity = '{folder.run['identity']}'"
        (found,) = client.search_runs([experiment.experiment_id], wanted)
        return found.info.status

    return says


def send(expansion, profile: Cluster = LOCAL, only: str | None = None) -> dict[str, str]:
    """Submit as ``harness.submit`` does; run name -> job id."""
    start, _ = submit(expansion, expansion.select(only))
    runs = [run for run in expansion.runs if run.name in start]
    return submit_arrays(expansion.folder, runs, profile)


def states(expansion) -> dict[str, str]:
    scheduler.forget()
    return {status.run: status.state for status in read_statuses(expansion.folder)}


def status_of(expansion, name: str):
    scheduler.forget()
    return next(s for s in read_statuses(expansion.folder) if s.run == name)


def settled(expansion, patience_s: float = 60) -> dict[str, str]:
    """The states once no run waits or works any more."""

    def at_rest():
        found = states(expansion)
        return found if not {"WAITING", "RUNNING", "UNKNOWN"} & set(found.values()) else None

    return wait_until(at_rest, patience_s)
