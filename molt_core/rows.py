"""Rows of prompt files, read and checked before a run starts: JSONL, parquet, and the folders that datasets saves.

A row has ``prompt`` (text, or chat messages), ``answer``, and, where it likes, ``id`` and ``images``: paths relative to the
file, encoded bytes, or ``{"bytes": ..., "path": ...}`` as datasets writes them. Pictures are read when they are asked for, and
once before a run starts (``data.check_prompts``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

Split = Literal["train", "eval"]
HELD_OUT_NAMES = frozenset({"test", "eval", "validation", "valid", "dev"})
LONGEST_SIDE = 200
"""Of a picture, times its shorter one: the image processors of Qwen2-VL and its successors refuse more."""


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
        return tuple(
            np.asarray(self._decoded(name, encoded)) for name, encoded in self._encoded_images()
        )

    def check_images(self) -> None:
        """Raises DataError where a picture is not there or cannot be decoded."""
        for name, encoded in self._encoded_images():
            self._decoded(name, encoded, coarse=True)

    def _decoded(self, name: str, encoded: bytes, coarse: bool = False) -> Image.Image:
        """coarse: of a JPEG every eighth pixel, which reads all of the file in a fraction of the time."""
        from PIL import Image

        try:
            picture = Image.open(BytesIO(encoded))
            short, long = sorted(picture.size)
            if coarse:
                picture.draft("RGB", (1, 1))
            picture = picture.convert("RGB")
        except Exception as error:  # a format's decoder raises what it likes
            what = f"cannot be decoded ({type(error).__name__}: {error})"
            raise DataError(f"{self.place}: {name}: {what}") from error
        if long > LONGEST_SIDE * short:
            raise DataError(
                f"{self.place}: {name}: {short} by {long} pixels; a side may be {LONGEST_SIDE} times the other at most"
            )
        return picture

    def _encoded_images(self) -> Iterator[tuple[str, bytes]]:
        for number, image in enumerate(self.values.get("images") or ()):
            name = f"images[{number}]"
            if isinstance(image, Mapping):
                image = image.get("bytes") or image.get("path")
            if isinstance(image, str):
                name = f"{name} ({image})"
                try:
                    image = (self.folder / image).read_bytes()
                except OSError as error:
                    raise DataError(f"{self.place}: {name}: {error}") from error
            if not isinstance(image, bytes):
                raise DataError(
                    f"{self.place}: {name}: {type(image).__name__} is neither a path nor encoded bytes"
                )
            yield name, image


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
    found = sorted(path for path in source.rglob("*") if path.suffix in _READERS)
    files = [file for file in found if file.suffix != ".arrow" or _is_data(file)]
    if not files:
        raise DataError(f"task.source: {source} holds no {kinds} file")
    return files


def _is_data(file: Path) -> bool:
    """Whether ``datasets`` lists the Arrow file as its folder's; beside its data it keeps what every ``.map`` has made.

    A folder of its cache has no list; what a ``.map`` has made is called cache-*.arrow there.
    """
    state = file.with_name("state.json")
    if not state.is_file():
        return not file.name.startswith("cache-")
    try:
        listed = json.loads(state.read_bytes())["_data_files"]
        return file.name in {entry["filename"] for entry in listed}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{state}: not what datasets writes ({error!r})") from error


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
    prompt, images = _without_absent_keys(values["prompt"]), values.get("images")
    if images is not None and not isinstance(images, list):
        raise DataError(f"{place}: images is not a list")
    places, count = _image_places(prompt), len(images or ())
    if places is not None and places != count:
        raise DataError(
            f'{place}: prompt has places for {places} images and images has {count}; give one {{"type": "image"}} part an image'
        )
    row_id = default_id if values.get("id") is None else values["id"]
    return {**values, "prompt": prompt, "id": row_id}


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def _is_message(message: Any) -> bool:
    if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, Mapping) for part in content)
    return isinstance(content, str)


def _without_absent_keys(prompt: str | list[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """A table gives every part the keys of all parts, None where it has none; a chat template asks for keys alone."""
    if isinstance(prompt, str):
        return prompt
    messages = [_present(message) for message in prompt]
    for message in messages:
        if not isinstance(message["content"], str):
            message["content"] = [_present(part) for part in message["content"]]
    return messages


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _image_places(prompt: str | list[Mapping[str, Any]]) -> int | None:
    """Parts of chat messages that are images, by the rule of the published chat templates; None for a text."""
    if isinstance(prompt, str):
        return None
    parts = (p for m in prompt if not isinstance(m["content"], str) for p in m["content"])
    return sum(p.get("type") == "image" or "image" in p or "image_url" in p for p in parts)


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield f"{file}, line {number}", json.loads(line)
                except ValueError as error:
                    raise DataError(
                        f"{file}, line {number}: not JSON in UTF-8 ({error})"
                    ) from error


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
