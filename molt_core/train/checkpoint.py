"""A run's checkpoints: a folder each, whole or not at all, whatever ends the run while one is written.

    RUN/checkpoints/step-00000050/
      trainer/         weights, moments, schedule, random streams: what the ranks of the trainer wrote
      loop.pickle      version, books, place in the data, finished groups that wait for the trainer, KL coefficient
      complete.json    step, its metrics record, the size of every file; written last
    RUN/checkpoints/saves.jsonl    of every save: step, seconds until it was whole, bytes

It is written under a name that starts with a dot, synced, and renamed, so a kill leaves either nothing or all of it. What a
broken disk or a half-copied folder leaves is noticed by the sizes, named, and passed over for the newest complete one.
The ranks write in the background (``Saver``): the loop waits for their copy in memory and for nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ray import cloudpickle

from molt_core.config import CheckpointConfig

MARKER, LOOP_STATE, TRAINER = "complete.json", "loop.pickle", "trainer"
SAVES = "saves.jsonl"
SCHEMA_VERSION = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or kept; the message names the folder and what to change."""


class OtherSchema(CheckpointError):
    """A whole checkpoint of another version of this code. Nothing is begun anew over it."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``bytes`` on disk; ``record`` is the metrics record of its step."""

    path: Path
    step: int
    bytes: int
    record: Mapping[str, Any]
    policy: str
    """The Hugging Face folder that the run began from, relative to this checkpoint."""

    @property
    def trainer(self) -> Path:
        return self.path / TRAINER

    def loop_state(self) -> dict[str, Any]:
        with open(self.path / LOOP_STATE, "rb") as file:
            return pickle.load(file)


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises CheckpointError that says what a torn checkpoint lacks, OtherSchema for one of another version."""
    path = Path(path)
    try:
        facts = dict(json.loads((path / MARKER).read_text()))
        version = facts["schema_version"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: no readable {MARKER}: it was never completed") from error
    if version != SCHEMA_VERSION:
        raise OtherSchema(
            f"{path}: schema version {version}, this code reads {SCHEMA_VERSION}; go on with the code that wrote it, or move "
            "the run's checkpoints away to begin anew"
        )
    found = _sizes(path)
    for name, size in facts["files"].items():
        if found.get(name) != size:
            raise CheckpointError(
                f"{path}: {name} has {found.get(name, 'no')} bytes, it was written with {size}"
            )
    return Checkpoint(path, facts["step"], sum(found.values()), facts["record"], facts["policy"])


class CheckpointStore:
    """The checkpoints of one run. One process writes here at a time (the run's lock sees to it)."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder, self.config = Path(folder), config

    def scan(self) -> tuple[list[Checkpoint], list[str]]:
        """(complete ones by step, what is wrong with the others). Raises OtherSchema."""
        complete, torn = [], []
        for path in sorted(self.folder.glob("step-*")):
            try:
                complete.append(read_checkpoint(path))
            except OtherSchema:
                raise
            except CheckpointError as error:
                torn.append(str(error))
        return sorted(complete, key=lambda checkpoint: checkpoint.step), torn

    def newest(self) -> Checkpoint | None:
        """Where to go on from; torn ones are named. What an attempt before this one left unfinished is cleared away."""
        self.clear_drafts()
        complete, torn = self.scan()
        for problem in torn:
            print(f"not used: {problem}", flush=True)
        return complete[-1] if complete else None

    def clear_drafts(self) -> None:
        """Remove what a killed attempt was writing."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path)

    def draft(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` in, until ``commit``."""
        draft = self.folder / f".step-{step:08d}"
        shutil.rmtree(draft, ignore_errors=True)
        (draft / TRAINER).mkdir(parents=True)
        return draft

    def commit(
        self, draft: Path, loop_state: bytes, record: Mapping[str, Any], policy: Path
    ) -> Checkpoint:
        """Complete ``draft`` and delete what it makes superfluous. The record must be on disk already."""
        path = self.folder / draft.name.removeprefix(".")
        (draft / LOOP_STATE).write_bytes(loop_state)
        sizes = _sizes(draft)
        facts = {
            "schema_version": SCHEMA_VERSION,
            "step": record["step"],
            "policy": os.path.relpath(policy, path),
            "record": record,
            "files": sizes,
        }
        (draft / MARKER).write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n")
        for name in (*sizes, MARKER):
            _sync(draft / name)
        for inner in sorted({(draft / name).parent for name in sizes}):
            _sync(inner)
        if path.exists():  # torn, or of a step that is being trained again
            _remove(path)
        os.rename(draft, path)
        _sync(self.folder)
        best_by = self.config.keep_best
        if best_by is not None and not isinstance(record.get(best_by), int | float):
            print(f"{path}: not kept as the best: its record has no {best_by}", flush=True)
        complete, _ = self.scan()
        for checkpoint in superfluous(complete, self.config):
            _remove(checkpoint.path)
        return read_checkpoint(path)

    def note(self, made: Checkpoint, save_s: float) -> None:
        """Write down how long the whole of a save has taken, which a scheduler's warning must leave time for."""
        facts = {"step": made.step, "save_s": save_s, "bytes": made.bytes}
        saves = self.folder / SAVES
        torn = saves.exists() and saves.read_bytes()[-1:] != b"\n"  # by a full disk or a power cut
        with open(saves, "a") as file:
            file.write("\n" * torn + json.dumps(facts) + "\n")


def superfluous(checkpoints: Sequence[Checkpoint], config: CheckpointConfig) -> list[Checkpoint]:
    """Those of ``checkpoints`` (by step) that the configuration does not keep. Never the newest.

    The disk budget takes the oldest first, and the best one only when nothing else is left. Raises CheckpointError where
    the newest alone is over it.
    """
    newest = checkpoints[-1]
    best = best_checkpoint(checkpoints, config)
    kept = [c for c in checkpoints if c in checkpoints[-config.keep_last :] or c is best]
    if config.max_disk_gb is not None:
        limit = config.max_disk_gb * 1e9
        if newest.bytes > limit:
            raise CheckpointError(
                f"{newest.path}: {newest.bytes / 1e9:.3g} GB, and checkpoint.max_disk_gb is {config.max_disk_gb}: raise it"
            )
        for candidate in sorted(kept[:-1], key=lambda c: (c is best, c.step)):
            if sum(c.bytes for c in kept) > limit:
                kept.remove(candidate)
    return [c for c in checkpoints if c not in kept]


def best_checkpoint(
    checkpoints: Sequence[Checkpoint], config: CheckpointConfig
) -> Checkpoint | None:
    """The one with the best ``keep_best``, the latest of equals; None where it is off or not measured yet.

    A checkpoint whose record lacks the metric is not it.
    """
    metric, sign = config.keep_best, 1 if config.best_is == "highest" else -1
    measured = [c for c in checkpoints if isinstance(c.record.get(metric), int | float)]
    return max(measured, key=lambda c: (sign * c.record[metric], c.step), default=None)


class SavingTrainer(Protocol):
    """What a ``Saver`` needs of the trainer; see ``train.worker.TrainerGroup``."""

    async def begin_save(self, folder: Path) -> None: ...

    async def finish_save(self) -> None: ...


class Saver:
    """Writes one checkpoint at a time while the run goes on: ``begin``, record the step, ``commit``.

    A save that failed raises CheckpointError at the next ``check`` or ``wait``.
    """

    def __init__(self, store: CheckpointStore, trainer: SavingTrainer, policy: Path) -> None:
        self.store, self.trainer, self.policy = store, trainer, policy
        self._task: asyncio.Task | None = None

    async def begin(self, step: int, loop_state: Mapping[str, Any]) -> None:
        """Copy the state of the loop at once, then that of the trainer; it may step as soon as this returns.

        The save before it must have ended (``wait``).
        """
        self._began = time.monotonic()
        self._loop_state = cloudpickle.dumps(loop_state)
        self._draft = self.store.draft(step)
        try:
            await self.trainer.begin_save(self._draft / TRAINER)
        except Exception as error:
            raise CheckpointError(f"{self._draft}: the save failed: {error}") from error

    def commit(self, record: Mapping[str, Any]) -> None:
        """The step's record is on disk: complete the checkpoint as soon as the ranks have written."""
        self._task = asyncio.create_task(self._complete(record))

    async def _complete(self, record: Mapping[str, Any]) -> None:
        try:
            await self.trainer.finish_save()
            made = await asyncio.to_thread(
                self.store.commit, self._draft, self._loop_state, record, self.policy
            )
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self._draft}: the save failed: {error}") from error
        try:
            self.store.note(made, time.monotonic() - self._began)
        except OSError as error:  # the checkpoint is whole; only a scheduler's hint is missing
            print(f"{self.store.folder / SAVES}: {error}", flush=True)

    def check(self) -> None:
        """Raise the failure of a save that has ended."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def wait(self) -> None:
        """Wait for the save in progress."""
        if self._task is not None:
            await self._task


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file in ``folder`` but the marker, by relative path."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != MARKER)
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(files)}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Out of sight first, so that a kill in between leaves no half of a checkpoint."""
    hidden = path.with_name(f".{path.name}.deleted")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
