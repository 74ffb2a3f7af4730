"""Prompts: built-in tasks, JSONL, parquet and Hugging Face folders behind one interface.

A position in the data is an integer: ``source.item(index)`` is the item dispatched at place ``index``. Each pass over the data
is a new permutation, drawn from the run's seed and the number of the pass, so that a resumed run needs that integer only.
What a row of a file may hold is said in ``rows.py``; keys besides its own reach the agent in ``Item.info``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from molt_core.agents import shapes
from molt_core.config import TaskConfig
from molt_core.rows import DataError, Row, Split, read_split
from molt_core.types import Item

__all__ = ["DataError", "PromptSource", "Split", "prompt_source"]


class PromptSource:
    """``length`` rows, in an order of their own a pass. ``shuffle_seed`` None keeps the order of the rows in every pass."""

    def __init__(
        self,
        row: Callable[[int], Item],
        length: int,
        shuffle_seed: int | None,
        digest: Callable[[int], bytes] | None = None,
    ) -> None:
        if length < 1:
            raise DataError("a prompt source needs at least one row")
        self._row, self._length, self._shuffle_seed = row, length, shuffle_seed
        self._digest = digest or (lambda number: row(number).digest())
        self._order = lru_cache(2)(self._permutation)

    def __len__(self) -> int:
        """Rows in a pass."""
        return self._length

    def item(self, index: int) -> Item:
        """The item at place ``index`` (from 0, without end) of the dispatch order."""
        if index < 0:
            raise IndexError(f"dispatch index {index} is negative")
        number_of_pass, place = divmod(index, self._length)
        return self._row(int(self._order(number_of_pass)[place]))

    @cached_property
    def content_hash(self) -> str:
        """sha256 over all rows, pictures included, whatever their order of dispatch. Reads everything once."""
        digest = hashlib.sha256()
        for number in range(self._length):
            digest.update(self._digest(number))
        return digest.hexdigest()

    def _permutation(self, number_of_pass: int) -> np.ndarray:
        if self._shuffle_seed is None:
            return np.arange(self._length)
        return np.random.default_rng((self._shuffle_seed, number_of_pass)).permutation(self._length)


def prompt_source(task: TaskConfig, split: Split, seed: int) -> PromptSource:
    """The prompts of ``task``. ``seed`` decides the order of training items and, of a built-in task, the items themselves.

    Held-out items are the same for every seed, in a fixed order. Raises DataError for files, ValueError for task.variant.
    """
    train = split == "train"
    if task.source == shapes.NAME:
        variant = shapes.ShapesVariant.from_config(task.variant)
        if not train:
            return PromptSource(variant.eval_item, task.eval_items, None)
        return PromptSource(lambda number: variant.train_item(seed, number), task.train_items, seed)
    if task.variant:
        raise DataError(
            f"task.variant holds parameters of built-in tasks, and {task.source} is none; remove {sorted(task.variant)}"
        )
    rows = read_split(Path(task.source), split, task.eval_items)
    return PromptSource(
        lambda number: _item(rows[number]),
        len(rows),
        seed if train else None,
        lambda number: rows[number].digest(),
    )


def _item(row: Row) -> Item:
    images, known = row.images(), {"prompt", "images", "answer", "id"}
    return Item(
        prompt_id=row.row_id,
        messages=_messages(row.values["prompt"], len(images)),
        images=images,
        answer=row.values["answer"],
        info={key: value for key, value in row.values.items() if key not in known},
    )


def _messages(prompt: str | list[Mapping[str, Any]], images: int) -> tuple[Mapping[str, Any], ...]:
    """Chat messages as they are; a text becomes one user message with the pictures before it."""
    if not isinstance(prompt, str):
        return tuple(prompt)
    if not images:
        return ({"role": "user", "content": prompt},)
    content = [{"type": "image"}] * images + [{"type": "text", "text": prompt}]
    return ({"role": "user", "content": content},)
