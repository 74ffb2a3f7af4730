"""A run's identity: the hash of everything that determines its result, and of nothing else.

Same identity, same folder: submitting twice runs nothing twice, and a folder never mixes two programs. Time, job id, host,
notes and the files that only look at runs (analysis, status, tests, docs) are left out on purpose.

The code is kept as a content-addressed copy beside the runs (``runs/.code/<hash>``). Runs import from that copy, so an edit
during an experiment reaches the next submit and never a run that waits or works.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The project's folder."""

CODE = ("molt_core", "harness/__init__.py", "harness/baselines", "harness/conformance.py")
"""What a run can import of this project, relative to ROOT."""
TOOLS = ("molt_core", "harness", "analysis")
"""What a job that waits in a queue imports, beside its run's code; no part of any identity."""

MIB = 1 << 20
SCHEMA = 1
"""Raise when a change elsewhere in the harness changes results: every identity changes with it."""


def canonical(value: Any) -> str:
    """JSON with one spelling for a value: sorted keys, no spaces, shortest floats, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def hash_path(path: Path, whole_up_to: int | None = None) -> str:
    """sha256 of a file's bytes, or of a folder's files by relative name.

    Of a file above ``whole_up_to`` bytes only the size, the first and the last mebibyte count: enough to tell two
    checkpoints of 60 GB apart in a second, not enough against an adversary.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return digest({str(file.relative_to(path)): hash_path(file, whole_up_to) for file in files})
    sha, size = hashlib.sha256(), path.stat().st_size
    with open(path, "rb") as file:
        if whole_up_to is not None and size > whole_up_to:
            sha.update(f"{size}\n".encode() + file.read(MIB))
            file.seek(size - MIB)
        while block := file.read(MIB):
            sha.update(block)
    return sha.hexdigest()


def code_files(root: Path = ROOT, code: tuple[str, ...] = CODE) -> list[Path]:
    """Relative paths of the files below ``code``: the working tree as it is, ignored files left out."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *code],
        capture_output=True,
    )
    if listed.returncode == 0:
        names = {Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name}
    else:  # an unpacked archive, or no git: the same files without git's ignore rules
        found = [root / entry for entry in code]
        found += [file for entry in found if entry.is_dir() for file in entry.rglob("*")]
        names = {f.relative_to(root) for f in found if f.is_file() and "__pycache__" not in f.parts}
    return sorted(name for name in names if name.suffix != ".md" and (root / name).is_file())


@dataclass(frozen=True)
class Snapshot:
    """A read-only copy of the code under the hash of its content."""

    hash: str
    path: Path


def take_snapshot(
    store: Path, root: Path = ROOT, write: bool = True, code: tuple[str, ...] = CODE
) -> Snapshot:
    """Copy what lies below ``code`` to ``store/<hash16>``; with ``write`` False only tell where it would lie."""
    contents = {str(name): (root / name).read_bytes() for name in code_files(root, code)}
    if not contents:
        raise FileNotFoundError(f"{root}: no code found under {', '.join(code)}")
    print_ = _fingerprint(contents)
    target = store / print_[:16]
    if write and not target.is_dir():
        store.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=store, prefix=".draft-"))
        for name, data in contents.items():
            file = draft / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(0o444)
        for folder in [draft, *(path for path in draft.rglob("*") if path.is_dir())]:
            folder.chmod(0o555)
        try:
            draft.rename(target)
        except OSError:  # another submit was first with the same content
            remove_snapshot(draft)
            if not target.is_dir():
                raise
    return Snapshot(print_, target)


def _fingerprint(contents: Mapping[str, bytes]) -> str:
    return digest({name: hashlib.sha256(data).hexdigest() for name, data in contents.items()})


def changed_snapshot(path: Path, recorded: str) -> str:
    """Why the copy of the code in ``path`` is not the one of that hash, as a sentence; "" where it is."""
    if not path.is_dir():
        return f"the copy of the code it was submitted with is gone ({path}); submit again"
    files = (file for file in path.rglob("*") if file.is_file())
    kept = [file for file in files if file.parent.name != "__pycache__"]  # Python's own
    found = _fingerprint({str(file.relative_to(path)): file.read_bytes() for file in kept})
    if found == recorded:
        return ""
    return (
        f"the copy of the code in {path} was changed after the submit (its hash is {found[:16]}, not {recorded[:16]}); "
        "remove it, check out that code and submit again"
    )


def remove_snapshot(path: Path) -> None:
    """Remove a copy, whose folders are read-only."""
    for folder in [path, *(inner for inner in path.rglob("*") if inner.is_dir())]:
        folder.chmod(0o755)
    shutil.rmtree(path)


def run_identity(
    kind: str,
    scale: Mapping[str, Any],
    protocol: Mapping[str, Any],
    *,
    code: str,
    files: Mapping[str, str | None],
    system: Mapping[str, Any] | None = None,
    seed: int | None = None,
    image: str | None = None,
    parents: Iterable[str] = (),
) -> str:
    """sha256 over what determines a run's result. ``parents``: identities of the runs whose product it reads."""
    return digest(
        {
            "schema": SCHEMA,
            "kind": kind,
            "scale": scale,
            "protocol": protocol,
            "system": system,
            "seed": seed,
            "code": code,
            "files": files,
            "image": image,
            "parents": sorted(parents),
        }
    )
