"""Rows of prompt files, read and checked before a run starts: JSONL, parquet, and the folders that datasets saves.

A row has ``prompt`` (text, or chat messages), ``answer``, and, where it likes, ``id`` and ``images``: paths relative to the
file, encoded bytes, or ``{"bytes": ..., "path": ...}`` as datasets writes them. Pictures are read when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

Split = Literal["train", "eval"]
HELD_OUT_NAMES = frozenset({"test", "eval", "validation", "valid", "dev"})


class DataError(ValueError):
    """A file or row that cannot be used; the message names the file, the row and the key."""


@dataclass(frozen=True)
class Row:
    """One checked row: its ``values`` by key, the ``place`` where it stands, for messages, and its file's ``folder``."""

    values: Mapping[str, Any]
    place: str
    folder: Path

    @property
    def row_id(self) -> str:
        return str(self.values["id"])

    def images(self) -> tuple[np.ndarray, ...]:
        """``[height, width, 3]`` uint8 each."""
        from PIL import Image, UnidentifiedImageError

        try:
            return tuple(
                np.asarray(Image.open(BytesIO(encoded)).convert("RGB"))
                for encoded in self._encoded_images()
            )
        except UnidentifiedImageError as error:
            raise DataError(f"{self.place}: images: not a picture ({error})") from error

    def digest(self) -> bytes:
        """sha256 over the values, pictures included."""
        plain = {key: value for key, value in self.values.items() if key != "images"}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
        for encoded in self._encoded_images():
            digest.update(hashlib.sha256(encoded).digest())
        return digest.digest()

    def _encoded_images(self) -> Iterator[bytes]:
        for image in self.values.get("images") or ():
            if isinstance(image, Mapping):
                image = image.get("bytes") or image.get("path")
            if isinstance(image, str):
                try:
                    image = (self.folder / image).read_bytes()
                except OSError as error:
                    raise DataError(f"{self.place}: images: {error}") from error
            if not isinstance(image, bytes):
                raise DataError(
                    f"{self.place}: images: {type(image).__name__} is neither a path nor encoded bytes"
                )
            yield image


def read_split(source: Path, split: Split, held_out: int) -> list[Row]:
    """The training or the held-out rows of a file or folder.

    Held out: the first ``held_out`` rows of a folder's test split where it has one (``test/``, ``test-00000-of-00001.parquet``,
    ``validation.jsonl``), else the ``held_out`` rows whose ids hash lowest: whatever the seed and, where rows have an ``id``,
    whatever their order.
    Raises DataError.
    """
    files = _files(source)
    tests = [f for f in files if source.is_dir() and _is_held_out(f.relative_to(source))]
    if tests:
        if len(tests) == len(files):
            raise DataError(f"task.source: {source} has held-out files and no training file")
        if split == "train":
            return _read(sorted(set(files) - set(tests)))
        rows = _read(tests)
        if len(rows) < held_out:
            raise DataError(
                f"task.eval_items: {held_out} held-out rows are asked for and the test split of {source} has "
                f"{len(rows)}; lower it"
            )
        return rows[:held_out]
    rows = _read(files)
    if held_out >= len(rows):
        raise DataError(
            f"task.eval_items: {held_out} rows are to be held out and {source} has {len(rows)}; lower it, or give a folder "
            "with a test split"
        )
    ranked = sorted(rows, key=lambda row: hashlib.sha256(row.row_id.encode()).digest())
    held = {row.row_id for row in ranked[:held_out]}
    return [row for row in rows if (row.row_id in held) == (split == "eval")]


def _files(source: Path) -> list[Path]:
    kinds = ", ".join(sorted(_READERS))
    if source.is_file():
        if source.suffix not in _READERS:
            raise DataError(f"task.source: {source} is none of {kinds}")
        return [source]
    if not source.is_dir():
        raise DataError(
            f"task.source: {source} is neither a built-in task, nor a file, nor a folder"
        )
    files = sorted(path for path in source.rglob("*") if path.suffix in _READERS)
    if not files:
        raise DataError(f"task.source: {source} holds no {kinds} file")
    return files


def _is_held_out(path: Path) -> bool:
    return path.stem.split("-")[0] in HELD_OUT_NAMES or not HELD_OUT_NAMES.isdisjoint(
        path.parts[:-1]
    )


def _read(files: Sequence[Path]) -> list[Row]:
    """All rows of ``files``; all are checked, so that a bad row stops a run before it starts and not in the middle."""
    rows: list[Row] = []
    first_place: dict[str, str] = {}
    for file in files:
        for place, values in _READERS[file.suffix](file):
            row = Row(_checked(values, place, default_id=f"row-{len(rows)}"), place, file.parent)
            if row.row_id in first_place:
                raise DataError(
                    f"{place}: id: {row.row_id!r} is also the id of {first_place[row.row_id]}"
                )
            first_place[row.row_id] = place
            rows.append(row)
    if not rows:
        raise DataError(f"task.source: {', '.join(map(str, files))}: no rows")
    return rows


def _checked(values: Any, place: str, default_id: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise DataError(f"{place}: a row is an object with keys, not {type(values).__name__}")
    for key in ("prompt", "answer"):
        if values.get(key) is None:
            raise DataError(
                f"{place}: key {key!r} is missing or null; the row has {sorted(values)}"
            )
    if not _is_prompt(values["prompt"]):
        raise DataError(
            f"{place}: prompt is neither text nor a list of messages with role and content"
        )
    images = values.get("images")
    if images is not None and not isinstance(images, list):
        raise DataError(f"{place}: images is not a list")
    return {**values, "id": default_id if values.get("id") is None else values["id"]}


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and message.get("content") is not None
            for message in prompt
        )
    )


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{file}, line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(f"{file}, line {number}: not JSON ({error})") from error


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error})") from error
    yield from _table_rows(file, table)


def _read_arrow(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as source:
            table = pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not an Arrow stream ({error})") from error
    yield from _table_rows(file, table)


def _table_rows(file: Path, table) -> Iterator[tuple[str, Any]]:
    for number, values in enumerate(table.to_pylist()):
        yield f"{file}, row {number}", values


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
