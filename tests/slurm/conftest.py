"""Tests on a real Slurm: the one that ``make slurm-local`` starts. Where it does not run, they are NOT RUN, in a loud line."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from slurm.local import cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if not cluster.running():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason="no Slurm"))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum("tests/slurm" in report.nodeid for report in skipped)
    if count:
        remedy = "start one by `make slurm-local`, then `make test-slurm`"
        terminalreporter.write_line(
            f"NOT RUN: {count} tests of tests/slurm, for want of a Slurm; {remedy}",
            red=True,
            bold=True,
        )


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
