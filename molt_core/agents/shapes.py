"""``shapes``: pictures of coloured squares, and questions with one right answer each.

Built in because it needs the whole path (image processor, vision tower, expert routing, sampling, a verifiable reward) and is
learned from scratch in minutes. An item is a pure function of its stream, seed and index; nothing is stored.

    question  color     one square: "what color is the square?" -> "red"
              left      two squares: "what color is the left square?" -> "red"
              larger    two squares: "what color is the larger square?" -> "red"
              describe  two squares, a sentence: "the larger square is red, the smaller square is blue"
              list      several, in a row: "name the colors ... from left to right" -> "red, blue, red"
              words     no picture, for a policy that reads text alone: "the left square is red, the right square is blue.
                        what color is the right square?" -> "blue"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from molt_core.strict import Strict
from molt_core.types import Item

NAME = "shapes"
WORDS = "words"

PALETTE = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "grey": (128, 128, 128),
    "yellow": (230, 210, 50),
    "purple": (150, 60, 190),
    "orange": (240, 140, 40),
    "cyan": (60, 200, 210),
}

QUESTIONS = {
    "color": "what color is the square?",
    "left": "what color is the left square?",
    "larger": "what color is the larger square?",
    "describe": "name the colors of all squares",
    "list": "name the colors of all squares from left to right",
    WORDS: "the left square is {}, the right square is {}. what color is the {} square?",
}

_TRAIN, _EVAL = 0, 1
_SIDE = 32
"""Height of every picture, and width of all but ``list``'s, in pixels."""
_SLOT = 16
"""Width of a place for one square of ``list``."""


class ShapesVariant(Strict):
    """Parameters of the task (``task.variant`` in the configuration).

    colors: how many of the palette are in use. noise: standard deviation added to every channel, in grey levels of 255.
    squares and fewest: most and least squares of ``list``. partial: the reward of ``list`` and ``describe`` is the share of
    squares named rightly instead of all or nothing.
    """

    question: Literal["color", "left", "larger", "describe", "list", "words"] = "color"
    colors: int = Field(4, ge=2, le=len(PALETTE))
    noise: float = Field(10.0, ge=0, le=128)
    squares: int = Field(4, ge=1, le=8)
    fewest: int = Field(2, ge=1)
    partial: bool = False

    @classmethod
    def from_config(cls, variant: Mapping[str, Any]) -> ShapesVariant:
        """Raises ValueError that names the key at fault."""
        try:
            found = cls.model_validate(variant, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            known = ", ".join(cls.model_fields)
            raise ValueError(
                f"task.variant.{first['loc'][0]}: {first['msg']}; shapes knows {known}"
            ) from error
        if found.fewest > found.squares:
            raise ValueError(
                f"task.variant.fewest: {found.fewest} is above task.variant.squares, {found.squares}"
            )
        return found

    def train_item(self, seed: int, number: int) -> Item:
        return self._item(train_id(seed, number), (_TRAIN, seed, number))

    def eval_item(self, number: int) -> Item:
        """Held-out item: the same for every run seed, from a stream that no training item comes from."""
        return self._item(f"{NAME}-eval-{number}", (_EVAL, number))

    def grade(self, answer: str, text: str) -> float:
        """1.0 for the answer itself; with ``partial``, the share of places named rightly, over the longer of both lists."""
        if not self.partial:
            return float(text.strip() == answer)
        right, given = answer.split(", "), text.strip().split(", ")
        return sum(a == b for a, b in zip(right, given)) / max(len(right), len(given))

    def _item(self, item_id: str, entropy: tuple[int, ...]) -> Item:
        rng = np.random.default_rng(entropy)
        content, images, answer = (
            self._in_words(rng) if self.question == WORDS else self._in_a_picture(rng)
        )
        return Item(
            prompt_id=item_id,
            messages=({"role": "user", "content": content},),
            images=images,
            answer=answer,
        )

    def _in_words(self, rng: np.random.Generator) -> tuple[str, tuple[()], str]:
        colors, asked = self._two_colors(rng), rng.integers(2)
        question = QUESTIONS[WORDS].format(*colors, ("left", "right")[asked])
        return question, (), colors[asked]

    def _in_a_picture(
        self, rng: np.random.Generator
    ) -> tuple[list[dict[str, str]], tuple[np.ndarray], str]:
        picture, answer = _DRAW[self.question](self, rng)
        if self.noise:
            picture = picture + rng.normal(0.0, self.noise, picture.shape)
        content = [{"type": "image"}, {"type": "text", "text": QUESTIONS[self.question]}]
        return content, (np.clip(np.rint(picture), 0, 255).astype(np.uint8),), answer

    def _color(self, rng: np.random.Generator) -> str:
        return list(PALETTE)[rng.integers(self.colors)]

    def _two_colors(self, rng: np.random.Generator) -> tuple[str, str]:
        first, second = rng.choice(self.colors, 2, replace=False)
        return list(PALETTE)[first], list(PALETTE)[second]


def train_id(seed: int, number: int) -> str:
    """The prompt id of ``ShapesVariant.train_item``."""
    return f"{NAME}-train-{seed}-{number}"


def _canvas(width: int = _SIDE) -> np.ndarray:
    return np.full((_SIDE, width, 3), 255.0)


def _paint(canvas: np.ndarray, top: int, left: int, side: int, color: str) -> None:
    canvas[top : top + side, left : left + side] = PALETTE[color]


def _one_square(variant: ShapesVariant, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    canvas, side, color = _canvas(), int(rng.integers(12, 24)), variant._color(rng)
    top, left = rng.integers(0, _SIDE - side + 1, 2)
    _paint(canvas, top, left, side, color)
    return canvas, color


def _left_of_two(variant: ShapesVariant, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    canvas, colors, half = _canvas(), variant._two_colors(rng), _SIDE // 2
    for column, color in enumerate(colors):
        side = int(rng.integers(8, half))
        top, left = rng.integers(0, _SIDE - side + 1), rng.integers(0, half - side + 1)
        _paint(canvas, top, column * half + left, side, color)
    return canvas, colors[0]


def _larger_of_two(variant: ShapesVariant, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    canvas, (larger, _) = _larger_and_smaller(variant, rng)
    return canvas, larger


def _both_described(variant: ShapesVariant, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    canvas, (larger, smaller) = _larger_and_smaller(variant, rng)
    return canvas, f"the larger square is {larger}, the smaller square is {smaller}"


def _larger_and_smaller(
    variant: ShapesVariant, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[str, str]]:
    """The two share the picture's height or width and never overlap; sides differ by 5 pixels or more."""
    canvas, colors, half = _canvas(), variant._two_colors(rng), _SIDE // 2
    sides = (int(rng.integers(12, half + 1)), int(rng.integers(4, 8)))
    first, across = rng.integers(2), rng.integers(2)
    for place, (side, color) in enumerate(zip(sides, colors)):
        along = ((place + first) % 2) * half + int(rng.integers(0, half - side + 1))
        beside = int(rng.integers(0, _SIDE - side + 1))
        _paint(canvas, *((beside, along) if across else (along, beside)), side, color)
    return canvas, colors


def _row_of_squares(variant: ShapesVariant, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    count = int(rng.integers(variant.fewest, variant.squares + 1))
    canvas = _canvas(_SLOT * variant.squares)
    colors = [variant._color(rng) for _ in range(count)]
    for place, color in enumerate(colors):
        side = int(rng.integers(8, 14))
        top, left = rng.integers(0, _SIDE - side + 1), rng.integers(0, _SLOT - side + 1)
        _paint(canvas, top, place * _SLOT + left, side, color)
    return canvas, ", ".join(colors)


_DRAW = {
    "color": _one_square,
    "left": _left_of_two,
    "larger": _larger_of_two,
    "describe": _both_described,
    "list": _row_of_squares,
}
