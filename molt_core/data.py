"""Prompts: built-in tasks, JSONL, parquet and Hugging Face folders behind one interface.

A position in the data is an integer: ``source.item(index)`` is the item dispatched at place ``index``. Each pass over the data
is a new permutation, drawn from the run's seed and the number of the pass, so that a resumed run needs that integer only.
What a row of a file may hold is said in ``rows.py``; keys besides its own reach the agent in ``Item.info``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from molt_core.agents import shapes
from molt_core.config import RunConfig, TaskConfig
from molt_core.models.layout import Architecture
from molt_core.rows import DataError, Row, Split, read_split
from molt_core.types import Item

__all__ = ["DataError", "PromptSource", "Split", "check_images_are_read", "prompt_source"]


class PromptSource:
    """``length`` rows, in an order of their own a pass. ``shuffle_seed`` None keeps the order of the rows in every pass."""

    def __init__(
        self,
        row: Callable[[int], Item],
        length: int,
        shuffle_seed: int | None,
        row_id: Callable[[int], str] | None = None,
    ) -> None:
        """row_id: of the row of a number, where it can be had without making its item."""
        if length < 1:
            raise DataError("a prompt source needs at least one row")
        self._row, self._length, self._shuffle_seed = row, length, shuffle_seed
        self._row_id = row_id or (lambda number: row(number).prompt_id)
        self._order = lru_cache(2)(self._permutation)

    def __len__(self) -> int:
        """Rows in a pass."""
        return self._length

    def item(self, index: int) -> Item:
        """The item at place ``index`` (from 0, without end) of the dispatch order."""
        return self._row(self._number(index))

    def prompt_id(self, index: int) -> str:
        """``item(index).prompt_id``, without its pictures."""
        return self._row_id(self._number(index))

    def _number(self, index: int) -> int:
        """Of the row that is dispatched at place ``index``."""
        if index < 0:
            raise IndexError(f"dispatch index {index} is negative")
        number_of_pass, place = divmod(index, self._length)
        return int(self._order(number_of_pass)[place])

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
        return PromptSource(
            lambda number: variant.train_item(seed, number),
            task.train_items,
            seed,
            lambda number: shapes.train_id(seed, number),
        )
    rows = _rows(task, split)
    return PromptSource(
        lambda number: _item(rows[number]),
        len(rows),
        seed if train else None,
        lambda number: rows[number].row_id,
    )


def _rows(task: TaskConfig, split: Split) -> list[Row]:
    if task.variant:
        raise DataError(
            f"task.variant holds parameters of built-in tasks, and {task.source} is none; remove {sorted(task.variant)}"
        )
    return read_split(Path(task.source), split, task.eval_items)


def check_prompts(task: TaskConfig) -> None:
    """Read all that ``task`` names, pictures too, before a run starts. Raises as ``prompt_source`` does."""
    if task.source == shapes.NAME:
        shapes.ShapesVariant.from_config(task.variant)
        return
    with ThreadPoolExecutor() as threads:
        for split in ("train", "eval"):
            for _ in threads.map(Row.check_images, _rows(task, split)):
                pass


def check_images_are_read(config: RunConfig, policy: Path) -> None:
    """Raise DataError, naming the place, where the task has images and a model that scores them reads text alone.

    policy: the folder that the run begins from; teacher and a critic of its own are looked at as well.
    """
    folders = {"model": policy, "algorithm.teacher": config.algorithm.teacher}
    folders["critic.path"] = None if config.critic is None else config.critic.path
    for key, folder in folders.items():
        architecture = None if folder is None else Architecture.of(Path(folder))
        if architecture is None or architecture.vision is not None:
            continue
        place = _first_image(config.task)
        if place is not None:
            raise DataError(
                f"{place}: it shows images, and {key} ({folder}) is a {architecture.model_type}, which reads text alone; take "
                "a vision-language model, or a task of text"
            )


def _first_image(task: TaskConfig) -> str | None:
    """Where the first images of ``task`` stand, None where it has none."""
    if task.source == shapes.NAME:
        question = shapes.ShapesVariant.from_config(task.variant).question
        return None if question == shapes.WORDS else f"task.variant.question: {question!r}"
    for split in ("train", "eval"):
        for row in read_split(Path(task.source), split, task.eval_items):
            if row.values.get("images"):
                return f"{row.place}, images"
    return None


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
