"""From an item to the tokens that the policy sees: chat template, tokenizer, image processor.

The engine takes one placeholder an image and expands it itself (``collapse``); the trainer takes the expanded ids and the
patches. Both come from here, so that the forward passes agree on where an image is, and nothing is ever re-tokenised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from molt_core.models.load import END_OF_TURN
from molt_core.rows import DataError
from molt_core.types import ImageInput, Item, Prompt

_TEMPLATES_KEPT = 4096


class Renderer:
    """Renders items for the model in ``folder``. Thread-safe after construction; the rendered chat templates are kept."""

    def __init__(self, folder: Path) -> None:
        # 3 s of imports, which a process that renders nothing need not pay.
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._image_token: int | None = getattr(config, "image_token_id", None)
        self._image_processor = (
            AutoImageProcessor.from_pretrained(folder, local_files_only=True)
            if self._image_token is not None
            else None
        )
        self._template_ids = lru_cache(_TEMPLATES_KEPT)(self._render_template)

    @property
    def merge_size(self) -> int:
        """Patches a side that become one token."""
        return self._image_processor.merge_size if self._image_processor is not None else 1

    def prompt(self, item: Item, index: int) -> Prompt:
        """``item`` as a prompt, ``index`` its place in the dispatch order.

        Raises DataError where the conversation's image places and the item's images differ in number.
        """
        return self._prompt(item, index, self._template_ids(json.dumps(item.messages)))[0]

    def conversation(self, item: Item, index: int) -> tuple[Prompt, list[tuple[int, int]]]:
        """``item`` as a prompt, and which stretches of its tokens the assistant said in turns before: [start, stop) each.

        By the chat template itself: what it adds to the messages before a turn, and to the opening of that turn, up to and
        with the end of turn. The pieces are tokenised one by one, as they would have been sampled. Raises DataError also where
        the template rewrites an earlier turn, which was then never said as it stands there.
        """
        messages, ids, stretches, written = item.messages, [], [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            opened = self._text(messages[:number], opened=True)
            closed = self._text(messages[: number + 1], opened=False)
            end = closed.find(END_OF_TURN, len(opened)) + len(END_OF_TURN)
            if not (closed.startswith(opened) and opened.startswith(written) and end > len(opened)):
                raise DataError(
                    f"prompt {item.prompt_id}: the chat template writes message {number} otherwise when others follow it; "
                    "train on conversations of one reply"
                )
            ids += self.encode(opened[len(written) :])
            said = self.encode(closed[len(opened) : end])
            stretches.append((len(ids), len(ids) + len(said)))
            ids, written = ids + said, closed[:end]
        text = self._text(messages, opened=True)
        if not text.startswith(written):
            raise DataError(
                f"prompt {item.prompt_id}: the chat template rewrites replies that others follow; train on conversations of one"
            )
        prompt, places = self._prompt(item, index, [*ids, *self.encode(text[len(written) :])])
        return prompt, [(places[start], places[stop]) for start, stop in stretches]

    def _prompt(self, item: Item, index: int, collapsed: Sequence[int]) -> tuple[Prompt, list[int]]:
        """The prompt of ``collapsed``, one placeholder an image, and where each of its tokens went, and its end."""
        if item.images and self._image_token is None:
            raise DataError(
                f"prompt {item.prompt_id}: it has {len(item.images)} images and the policy reads text alone; take rows without "
                "images, or a vision-language model"
            )
        places = [i for i, token in enumerate(collapsed) if token == self._image_token]
        if len(places) != len(item.images):
            raise DataError(
                f"prompt {item.prompt_id}: its messages have places for {len(places)} images and it has {len(item.images)}; "
                'give one {"type": "image"} part an image, and no placeholder token in the text'
            )
        token_ids: list[int] = []
        images: list[ImageInput] = []
        lengths = np.ones(len(collapsed), int)
        cursor = 0
        for place, pixels in zip(places, item.images):
            token_ids += collapsed[cursor:place]
            images.append(self._image(pixels, start=len(token_ids)))
            token_ids += [self._image_token] * images[-1].length
            lengths[place] = images[-1].length
            cursor = place + 1
        token_ids += collapsed[cursor:]
        prompt = Prompt(
            item.prompt_id, index, tuple(token_ids), tuple(images), item.answer, item.info
        )
        return prompt, [0, *np.cumsum(lengths).tolist()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def token(self, token_id: int) -> str:
        """How the vocabulary writes an id, for messages."""
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def _render_template(self, messages: str) -> tuple[int, ...]:
        return tuple(self.encode(self._text(json.loads(messages), opened=True)))

    def _text(self, messages: Sequence[Mapping[str, Any]], opened: bool) -> str:
        """The conversation as the chat template writes it; ``opened``: with the opening of the next reply."""
        return self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=opened, tokenize=False
        )

    def _image(self, pixels: np.ndarray, start: int) -> ImageInput:
        features = self._image_processor(
            images=pixels, input_data_format="channels_last", return_tensors="np"
        )
        grid = tuple(int(n) for n in features["image_grid_thw"][0])
        return ImageInput(
            pixels=pixels,
            patches=np.asarray(features["pixel_values"], dtype=np.float32),
            grid_thw=grid,
            start=start,
            length=grid[0] * grid[1] * grid[2] // self.merge_size**2,
        )


def collapse(token_ids: Sequence[int], images: Sequence[ImageInput]) -> list[int]:
    """``token_ids`` with the span of each image cut to its first placeholder. Spans ascend and do not overlap."""
    out: list[int] = []
    cursor = 0
    for image in images:
        out += token_ids[cursor : image.start + 1]
        cursor = image.start + image.length
    out += token_ids[cursor:]
    return out
