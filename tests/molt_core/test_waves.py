"""Lockstep's waves: what the engine gets together, and in which order, does not depend on when it was asked."""

import asyncio
import random
from contextlib import suppress

import pytest

from molt_core.rollout.waves import Waves


class Engine:
    """Keeps the seeds of each composition; answers with the seed."""

    def __init__(self) -> None:
        self.compositions: list[list[int]] = []

    async def generate_together(self, calls):
        seeds = [named["seed"] for _, named in calls]
        self.compositions.append(seeds)
        for _ in range(3):
            await asyncio.sleep(0)
        if -1 in seeds:
            raise RuntimeError("the engine is down")
        return seeds


async def episode(waves: Waves, name: int, turns: int, pause: random.Random) -> list[int]:
    """An agent that asks ``turns`` times, and dawdles before each."""
    answers = []
    with waves.episode():
        for turn in range(turns):
            for _ in range(pause.randrange(5)):
                await asyncio.sleep(0)
            seed = name * 10 + turn
            answers.append(await waves.generate([1, 2], (), seed=seed, episode=name))
    return answers


async def play(turns: dict[int, int], seed: int, waves: Waves) -> list[list[int]]:
    pause = random.Random(seed)
    waves.expect(len(turns))
    names = list(turns)
    pause.shuffle(names)
    answers = await asyncio.gather(*(episode(waves, n, turns[n], pause) for n in names))
    assert sorted(answers) == [[n * 10 + t for t in range(turns[n])] for n in sorted(turns)]


@pytest.mark.parametrize("seed", range(10))
def test_compositions_follow_from_the_episodes_alone(seed):
    """Episode 1 asks three times, 2 once, 3 twice: three waves, each by seed."""
    engine = Engine()
    waves = Waves(engine)
    asyncio.run(play({1: 3, 2: 1, 3: 2}, seed, waves))
    assert engine.compositions == [[10, 20, 30], [11, 31], [12]]


def test_an_episode_that_never_asks_or_fails_does_not_hold_the_others_up():
    engine = Engine()
    waves = Waves(engine)

    async def failing():
        with suppress(ValueError), waves.episode():
            raise ValueError

    async def both():
        waves.expect(3)
        pause = random.Random(0)
        await asyncio.gather(episode(waves, 1, 2, pause), failing(), episode(waves, 2, 0, pause))

    asyncio.run(both())
    assert engine.compositions == [[10], [11]]


def test_what_comes_after_is_expected_anew():
    engine = Engine()
    waves = Waves(engine)

    async def twice():
        await play({1: 1, 2: 1}, 0, waves)
        await play({3: 1, 4: 1, 5: 1}, 0, waves)

    asyncio.run(twice())
    assert engine.compositions == [[10, 20], [30, 40, 50]]


def test_a_call_that_was_cancelled_takes_nobody_elses_answer():
    async def gives_up(waves: Waves):
        with waves.episode():
            with suppress(TimeoutError):
                await asyncio.wait_for(waves.generate([1], (), seed=1, episode=0), 1e-9)
            return [await waves.generate([1], (), seed=2, episode=0)]

    async def both():
        waves = Waves(Engine())
        waves.expect(2)
        other = episode(waves, 3, 2, random.Random(0))
        return await asyncio.wait_for(asyncio.gather(gives_up(waves), other), 5)

    assert asyncio.run(both()) == [[2], [30, 31]]


def test_a_call_beside_one_that_is_being_computed_gets_a_wave_of_its_own():
    engine = Engine()

    async def later(waves: Waves):
        while not engine.compositions:
            await asyncio.sleep(0)
        return await waves.generate([1], (), seed=2, episode=0)

    async def side_by_side():
        waves = Waves(engine)
        waves.expect(1)
        with waves.episode():
            both = asyncio.gather(later(waves), waves.generate([1], (), seed=1, episode=0))
            return await asyncio.wait_for(both, 5)

    assert asyncio.run(side_by_side()) == [2, 1]
    assert engine.compositions == [[1], [2]]


def test_the_engines_failure_reaches_whoever_asked():
    waves = Waves(Engine())

    async def ask(seed):
        with waves.episode():
            await waves.generate([1], (), seed=seed, episode=seed)

    async def both():
        waves.expect(2)
        return await asyncio.gather(ask(-1), ask(7), return_exceptions=True)

    assert [str(error) for error in asyncio.run(both())] == ["the engine is down"] * 2
