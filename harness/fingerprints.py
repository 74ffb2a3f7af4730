"""What a run ran on: packages, hardware, commit. Recorded with every attempt, never part of the identity.

Each probe may find nothing; then its value is absent, not guessed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

GIB = 1024**3


def packages() -> dict[str, str]:
    """Name -> version of every installed distribution, and of Python."""
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions()}
    return {"python": ".".join(map(str, sys.version_info[:3])), **dict(sorted(found.items()))}


def packages_hash(installed: dict[str, str]) -> str:
    text = "\n".join(f"{name}=={version}" for name, version in sorted(installed.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def hardware() -> dict[str, Any]:
    """Processor, cores, memory in GiB and accelerators by name: equal on machines where a time means the same."""
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if models:
            found["processor"] = models[0].partition(":")[2].strip()
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        if listed.returncode == 0:
            found["accelerators"] = sorted(listed.stdout.strip().splitlines())
    return found


def commit(root: Path) -> dict[str, Any]:
    """Commit and whether the tree differs from it; {} outside git."""

    def git(*arguments: str) -> str | None:
        result = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    return {} if head is None else {"commit": head, "dirty": bool(git("status", "--porcelain"))}


def scheduler() -> dict[str, Any]:
    """Where an attempt runs: host, and the Slurm job where there is one."""
    names = (
        *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"),
        *("SLURM_JOB_NODELIST", "SLURMD_NODENAME"),
    )
    found = {name.lower(): os.environ[name] for name in names if name in os.environ}
    return {"host": socket.gethostname(), **found}
