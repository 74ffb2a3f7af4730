"""How a run lies on disk, for those who write it: names, atomic JSON, attempts, and the lock that makes it one writer's.

    <system>-s<seed>-<hash8>/
      run.json        what it is; written at submit, completed with fingerprints when an attempt starts
      config.yaml     the resolved configuration that the command reads
      lock            held while a job works here; says who
      attempts/01/    output.log, start.json, end.json
      heartbeat.json  metrics.jsonl  done.json

The lock is the kernel's (an open-file-description lock): it vanishes with its process, however that dies, and asking
whether it is held does not disturb it. The same lock makes a change to a shared file one step (``edit_json``).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.redaction import redact

_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class Busy(RuntimeError):
    """Somebody else holds the lock; the message says who."""


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, None where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` whole: a reader sees the old object or the new one, also after a power cut. Secrets are taken out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        json.dump(redact(value), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.chmod(draft, 0o644)
    os.replace(draft, path)


@contextmanager
def edit_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the object in ``path`` ({} where there is none), to be changed in place and then written back.

    Whoever else edits it meanwhile waits, so that of two changes at once none is lost. Nothing is written where the block
    raises or changes nothing.
    """
    with hold(path.with_name(f".{path.name}.lock"), wait=True):
        value = read_json(path) or {}
        before = json.dumps(value)
        yield value
        if json.dumps(value) != before:
            write_json(path, value)


@contextmanager
def hold(path: Path, *, wait: bool = False, **about: Any) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs. Raises Busy, naming the holder, where it is taken and not ``wait``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(file, how, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
        except (BlockingIOError, PermissionError) as error:
            raise Busy(f"{path} is held by {describe_holder(path)}") from error
        file.truncate()
        own = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time(), **about}
        own["process_started"] = process_started(os.getpid())
        json.dump({key: value for key, value in own.items() if value is not None}, file)
        file.flush()
        yield


def is_held(path: Path) -> bool:
    """True while some process holds the lock."""
    try:
        with open(path, "rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_RDLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked)
    except FileNotFoundError:
        return False
    return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK


def holder(path: Path) -> dict[str, Any]:
    """Who holds (or last held) the lock: pid, host, since, and the scheduler's job id where there is one.

    process_started tells a process from a later one with the same number.
    """
    text = path.read_text() if path.exists() else ""
    return json.loads(text) if text.strip() else {}


def process_started(pid: int) -> int | None:
    """When process ``pid`` of this machine began, in the kernel's clock ticks since boot; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the name in brackets may hold anything


def describe_holder(path: Path) -> str:
    about = holder(path)
    return f"process {about.get('pid', '?')} on {about.get('host', '?')}"


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. Everything is read afresh: the folder is the state."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def mark(self) -> str:
        """The word that every process of this run carries (``harness/processes.py``).

        The identity alone would be another run's too: of the same experiment, submitted from another folder.
        """
        place = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()
        return f"{self.run['identity']}-{place[:8]}"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def run(self) -> dict[str, Any]:
        """run.json. Raises FileNotFoundError that says how to make one."""
        run = read_json(self.path / "run.json")
        if run is None:
            raise FileNotFoundError(
                f"{self.path}/run.json: not a run folder; `python -m harness.submit` makes them"
            )
        return run

    @property
    def done(self) -> dict[str, Any] | None:
        return read_json(self.path / "done.json")

    @property
    def heartbeat(self) -> dict[str, Any] | None:
        return read_json(self.path / "heartbeat.json")

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def attempts(self) -> list[Path]:
        found = [p for p in self.path.glob("attempts/*") if re.fullmatch(r"\d+", p.name)]
        return sorted(found, key=lambda path: int(path.name))

    @property
    def end(self) -> dict[str, Any] | None:
        """How the last attempt ended; None where none has, or it ended without a word."""
        attempts = self.attempts
        return read_json(attempts[-1] / "end.json") if attempts else None

    @property
    def needs(self) -> list[RunFolder]:
        return [RunFolder(self.path.parent / name) for name in self.run.get("needs", [])]

    def is_working(self) -> bool:
        return is_held(self.lock)

    def new_attempt(self) -> Path:
        """The next attempt's folder; the folders of earlier ones are kept."""
        attempts = self.attempts
        folder = self.path / "attempts" / f"{int(attempts[-1].name) + 1 if attempts else 1:02d}"
        folder.mkdir(parents=True)
        return folder

    def update_run(self, **fields: Any) -> None:
        """Add to run.json, or replace what is there."""
        with edit_json(self.path / "run.json") as run:
            run.update(fields)


def tail_records(path: Path, count: int, block: int = 64 * 1024) -> list[dict[str, Any]]:
    """The last ``count`` whole records of a JSON-lines file, without reading all of it."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        data = b""
        while size > 0 and data.count(b"\n") <= count:
            start = max(0, size - block)
            file.seek(start)
            data, size = file.read(size - start) + data, start
    whole = data[: data.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in whole[-count:]]


def run_folders(scale_folder: Path) -> list[RunFolder]:
    """Every run folder of one experiment and scale, in the order of names."""
    return [RunFolder(path.parent) for path in sorted(scale_folder.glob("*/run.json"))]


def scale_folders(
    runs_dir: Path, experiment: str | None = None, scale: str | None = None
) -> list[Path]:
    """Folders of experiment and scale below ``runs_dir``. Raises FileNotFoundError that names what is there."""
    found = sorted({path.parent for path in runs_dir.glob("[!.]*/[!.]*/queue.json")})
    chosen = [
        folder
        for folder in found
        if experiment in (None, folder.parent.name) and scale in (None, folder.name)
    ]
    if not chosen:
        wanted = "/".join(part or "*" for part in (experiment, scale))
        there = ", ".join(f"{folder.parent.name}/{folder.name}" for folder in found) or "nothing"
        raise FileNotFoundError(f"{runs_dir}/{wanted}: no such experiment; there is {there}")
    return chosen
