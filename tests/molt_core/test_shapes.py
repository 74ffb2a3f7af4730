"""The built-in task: deterministic items, answers that the pixels bear out, grades, and errors that name the key."""

import asyncio
import re

import numpy as np
import pytest

from molt_core.agents.base import Generation
from molt_core.agents.load import load_agent
from molt_core.agents.shapes import PALETTE, ShapesVariant
from molt_core.config import TaskConfig
from molt_core.data import prompt_source
from molt_core.types import Prompt


def _areas(pixels, threshold=12):
    """{color: its pixels as (rows, columns)} of a noise-free picture, by distance to the palette."""
    found = {}
    for name, color in PALETTE.items():
        near = np.abs(pixels.astype(int) - np.array(color)).max(-1) < threshold
        if near.any():
            found[name] = np.nonzero(near)
    return found


@pytest.mark.parametrize("number", range(30))
def test_color_is_the_color_of_the_one_square(number):
    item = ShapesVariant(noise=0, colors=8).train_item(0, number)
    areas = _areas(item.images[0])
    assert set(areas) == {item.answer}
    rows, columns = areas[item.answer]
    side = np.ptp(rows) + 1
    assert side == np.ptp(columns) + 1 and side**2 == len(rows)


@pytest.mark.parametrize("number", range(30))
def test_left_is_the_color_further_left(number):
    item = ShapesVariant(question="left", noise=0).train_item(0, number)
    columns = {name: area[1].mean() for name, area in _areas(item.images[0]).items()}
    assert len(columns) == 2 and item.answer == min(columns, key=columns.get)


@pytest.mark.parametrize("number", range(30))
def test_describe_names_both_sizes(number):
    item = ShapesVariant(question="describe", noise=0).train_item(0, number)
    sizes = {name: len(area[0]) for name, area in _areas(item.images[0]).items()}
    smaller, larger = sorted(sizes, key=sizes.get)
    assert item.answer == f"the larger square is {larger}, the smaller square is {smaller}"


@pytest.mark.parametrize("number", range(30))
def test_larger_is_the_color_of_the_larger_square(number):
    item = ShapesVariant(question="larger", noise=0).train_item(0, number)
    sizes = {name: len(area[0]) for name, area in _areas(item.images[0]).items()}
    assert len(sizes) == 2 and item.answer == max(sizes, key=sizes.get)


@pytest.mark.parametrize("number", range(30))
def test_words_say_both_colors_and_ask_for_one_without_a_picture(number):
    item = ShapesVariant(question="words", colors=8).train_item(0, number)
    (message,) = item.messages
    said = re.fullmatch(
        r"the left square is (?P<left>\w+), the right square is (?P<right>\w+)\. "
        r"what color is the (?P<asked>left|right) square\?",
        message["content"],
    )
    assert item.images == () and item.answer == said[said["asked"]]
    assert {said["left"], said["right"]} <= set(PALETTE) and said["left"] != said["right"]


def test_words_ask_for_either_side():
    asked = {
        ShapesVariant(question="words").train_item(0, n).messages[0]["content"].split()[-2]
        for n in range(20)
    }
    assert asked == {"left", "right"}


@pytest.mark.parametrize("number", range(30))
def test_list_names_the_squares_from_left_to_right(number):
    item = ShapesVariant(question="list", noise=0, squares=5, fewest=2).train_item(0, number)
    pixels = item.images[0]
    assert pixels.shape == (32, 80, 3)
    named = []
    for left in range(0, 80, 16):
        named += list(_areas(pixels[:, left : left + 16]))
    assert ", ".join(named) == item.answer and 2 <= len(named) <= 5


def test_items_are_a_function_of_seed_and_number():
    variant = ShapesVariant()
    one, again = variant.train_item(3, 5), variant.train_item(3, 5)
    np.testing.assert_array_equal(one.images[0], again.images[0])
    assert not np.array_equal(one.images[0], variant.train_item(4, 5).images[0])
    assert not np.array_equal(one.images[0], variant.train_item(3, 6).images[0])


def test_held_out_items_are_the_same_for_every_seed_and_in_no_training_stream():
    task = TaskConfig(source="shapes", train_items=300, eval_items=100)
    held_out = prompt_source(task, "eval", seed=0)
    again = prompt_source(task, "eval", seed=5)
    pictures = {held_out.item(n).images[0].tobytes() for n in range(100)}
    assert pictures == {again.item(n).images[0].tobytes() for n in range(100)}
    for seed in range(3):
        train = prompt_source(task, "train", seed)
        assert pictures.isdisjoint(train.item(n).images[0].tobytes() for n in range(300))


def test_seeds_have_items_of_their_own():
    task = TaskConfig(source="shapes", train_items=50)
    one, two = prompt_source(task, "train", 0), prompt_source(task, "train", 1)
    assert {one.item(n).prompt_id for n in range(50)}.isdisjoint(
        two.item(n).prompt_id for n in range(50)
    )


def test_answers_are_spread_evenly():
    """Each of four colors within four standard errors of a quarter of 2,000 items."""
    answers = [ShapesVariant().train_item(0, n).answer for n in range(2000)]
    for color in list(PALETTE)[:4]:
        assert abs(answers.count(color) / 2000 - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 2000)


@pytest.mark.parametrize(
    ("partial", "text", "reward"),
    [
        (False, "red, blue, red", 1.0),
        (False, " red, blue, red\n", 1.0),
        (False, "red, blue", 0.0),
        (True, "red, blue, red", 1.0),
        (True, "red, red, red", 2 / 3),
        (True, "red, blue, red, red", 3 / 4),
        (True, "", 0.0),
    ],
)
def test_grades_worked_by_hand(partial, text, reward):
    variant = ShapesVariant(question="list", partial=partial)
    assert variant.grade("red, blue, red", text) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"colour": 4}, r"task.variant.colour: .*not permitted; shapes knows question, colors"),
        ({"colors": 9}, r"task.variant.colors: .*less than or equal to 8"),
        ({"colors": "four"}, r"task.variant.colors: .*valid integer"),
        ({"noise": True}, r"task.variant.noise: .*valid number"),
        ({"question": "shape"}, r"task.variant.question: .*'color'"),
        ({"fewest": 6}, r"task.variant.fewest: 6 is above task.variant.squares, 4"),
    ],
)
def test_a_bad_variant_names_its_key(variant, message):
    with pytest.raises(ValueError, match=message):
        ShapesVariant.from_config(variant)


class _Context:
    """Answers with a fixed text and remembers what it was asked."""

    def __init__(self, answer, text):
        self.prompt = Prompt("q", 0, (1, 2, 3), (), answer)
        self.text, self.asked = text, []

    async def generate(self, token_ids, images=()):
        self.asked.append((tuple(token_ids), images))
        return Generation((4,), self.text, "stop")


def test_single_turn_agent_asks_once_with_the_prompt_and_grades_the_text():
    agent = load_agent(TaskConfig(source="shapes"))
    context = _Context("red", "red")
    assert asyncio.run(agent.run(context)).reward == 1.0
    assert context.asked == [((1, 2, 3), ())]
    assert asyncio.run(agent.run(_Context("red", "blue"))).reward == 0.0


class NotAsync:
    def __init__(self, task) -> None: ...

    def run(self, context): ...


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("many_turns", "neither 'single_turn' nor"),
        ("molt_core.nowhere:Agent", "cannot be imported"),
        ("molt_core.agents.base:Agentt", "cannot be imported"),
        ("tests.molt_core.test_shapes:NotAsync", "has no method 'async def run"),
    ],
)
def test_an_unknown_agent_is_named(agent, message):
    with pytest.raises(ValueError, match=f"task.agent: '{agent}' .*{message}"):
        load_agent(TaskConfig(source="shapes", agent=agent))
