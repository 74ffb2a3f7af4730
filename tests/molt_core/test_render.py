"""Rendering equals transformers' own processor; positions equal transformers' own get_rope_index."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer

from molt_core.agents.shapes import ShapesVariant
from molt_core.models.load import load_policy
from molt_core.models.tiny import build_tiny_qwen3_moe, build_tiny_qwen3_vl_moe
from molt_core.render import Renderer, collapse
from molt_core.rows import DataError
from molt_core.train.collate import mrope_positions
from molt_core.types import Item

SHAPES = {"text": (), "one": ((32, 32),), "two": ((32, 48), (64, 32)), "resized": ((50, 30),)}
"""Heights and widths of a prompt's pictures; the last is no multiple of the patch and is resized by the processor."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture(scope="module")
def renderer(folder):
    return Renderer(folder)


def _item(shapes):
    rng = np.random.default_rng(0)
    content = []
    for _ in shapes:
        content += [{"type": "text", "text": "look: "}, {"type": "image"}]
    content.append({"type": "text", "text": "what color is the square?"})
    return Item(
        prompt_id="q",
        messages=(
            {"role": "system", "content": "name one color"},
            {"role": "user", "content": content},
        ),
        images=tuple(rng.integers(0, 256, (*shape, 3), np.uint8) for shape in shapes),
        answer="red",
    )


def _reference(folder, item):
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(list(item.messages), add_generation_prompt=True)
    return text, processor(text=[text], images=list(item.images) or None, return_tensors="pt")


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_ids_patches_and_grids_equal_the_processor_of_transformers(folder, renderer, shapes):
    item = _item(shapes)
    prompt = renderer.prompt(item, index=7)
    _, expected = _reference(folder, item)
    assert list(prompt.token_ids) == expected.input_ids[0].tolist()
    assert (prompt.index, prompt.answer) == (7, "red")
    if shapes:
        patches = np.concatenate([image.patches for image in prompt.images])
        np.testing.assert_array_equal(patches, expected.pixel_values.numpy())
        assert [image.grid_thw for image in prompt.images] == [
            tuple(grid) for grid in expected.image_grid_thw.tolist()
        ]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_image_spans_are_where_the_processor_puts_them(folder, renderer, shapes):
    item = _item(shapes)
    prompt = renderer.prompt(item, 0)
    covered = np.zeros(len(prompt.token_ids), dtype=int)
    for image in prompt.images:
        covered[image.start : image.start + image.length] += 1
    _, expected = _reference(folder, item)
    np.testing.assert_array_equal(covered, expected.mm_token_type_ids[0].numpy())


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_collapsed_prompt_has_one_placeholder_an_image(folder, renderer, shapes):
    item = _item(shapes)
    text, _ = _reference(folder, item)
    unexpanded = AutoProcessor.from_pretrained(folder).tokenizer(text).input_ids
    prompt = renderer.prompt(item, 0)
    assert collapse(prompt.token_ids, prompt.images) == unexpanded


def test_positions_equal_get_rope_index(folder, renderer):
    """Text only, one image, two images, non-square grids."""
    model = load_policy(folder).model
    for shapes in SHAPES.values():
        prompt = renderer.prompt(_item(shapes), 0)
        _, inputs = _reference(folder, _item(shapes))
        expected, _ = model.get_rope_index(
            inputs.input_ids, inputs.mm_token_type_ids, inputs.get("image_grid_thw")
        )
        found = mrope_positions(len(prompt.token_ids), prompt.images, renderer.merge_size)
        assert torch.equal(torch.from_numpy(found), expected[:, 0]), shapes


def test_decoding_leaves_special_tokens_out(folder, renderer):
    ids = AutoProcessor.from_pretrained(folder).tokenizer("red, blue<|im_end|>").input_ids
    assert renderer.decode(ids) == "red, blue"


def test_a_placeholder_in_the_text_is_refused(renderer):
    item = Item("q9", ({"role": "user", "content": "see <|image_pad|>"},))
    with pytest.raises(DataError, match="prompt q9: .*places for 1 images and it has 0"):
        renderer.prompt(item, 0)


def test_a_policy_of_text_alone_reads_text_and_refuses_images(tmp_path):
    renderer = Renderer(build_tiny_qwen3_moe(tmp_path))
    item = _item(())
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        list(item.messages), add_generation_prompt=True, return_dict=False
    )
    assert list(renderer.prompt(item, 0).token_ids) == expected
    with pytest.raises(ValueError, match="prompt q: it has 1 images and the policy reads text"):
        renderer.prompt(_item(((32, 32),)), 0)


def test_rendering_a_prompt_takes_less_than_two_milliseconds(renderer):
    variant = ShapesVariant()
    items = [variant.train_item(0, number) for number in range(50)]
    renderer.prompt(items[0], 0)
    durations = []
    for item in items:
        start = time.perf_counter()
        renderer.prompt(item, 0)
        durations.append(time.perf_counter() - start)
    assert np.median(durations) < 2e-3


def _conversation(shapes):
    """Two replies, pictures before the first and the last question, and the question that is open."""
    first, opened = _item(shapes), {"role": "user", "content": [{"type": "text", "text": "sure?"}]}
    replies = ("red <b>", "a square")
    said = [{"role": "assistant", "content": reply} for reply in replies]
    messages = (*first.messages, said[0], opened, said[1], *first.messages[1:])
    return replace(first, messages=messages, images=2 * first.images), replies


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_conversation_is_the_prompt_and_says_where_the_assistant_spoke(folder, renderer, shapes):
    item, replies = _conversation(shapes)
    prompt, stretches = renderer.conversation(item, 3)
    _, expected = _reference(folder, item)
    assert list(prompt.token_ids) == expected.input_ids[0].tolist()
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    assert [tokenizer.decode(prompt.token_ids[slice(*s)]) for s in stretches] == [
        f"{reply}<|im_end|>" for reply in replies
    ]
    assert (prompt.index, prompt.answer, len(prompt.images)) == (3, "red", 2 * len(shapes))


def test_a_template_that_rewrites_what_was_said_is_refused(folder):
    renderer = Renderer(folder)
    renderer._tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ 'short' if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
    )
    turns = [{"role": r, "content": "long"} for r in ("user", "assistant", "user")]
    with pytest.raises(ValueError, match="prompt q: the chat template rewrites replies"):
        renderer.conversation(Item("q", tuple(turns)), 0)
    more = (*turns, {"role": "assistant", "content": "x"}, turns[0])
    with pytest.raises(ValueError, match="prompt q: the chat template writes message 3 otherwise"):
        renderer.conversation(Item("q", more), 0)
