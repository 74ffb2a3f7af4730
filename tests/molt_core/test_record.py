"""What is written down behind an agent's back: the ids, log-probabilities and versions that the engine gave, and no others."""

import asyncio
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from molt_core.config import SamplingConfig
from molt_core.rollout.engine import EngineError, Sampled, _sampled
from molt_core.rollout.record import Recorder, request_seed
from molt_core.types import ContractError, ImageInput, NotFinite, Prompt


class Scripted:
    """Answers request by request from a list of (ids, log-probs, versions, finish reason); an exception is raised."""

    def __init__(self, *answers) -> None:
        self.answers, self.requests = list(answers), []

    async def generate(self, prompt_ids, images, **options) -> Sampled:
        self.requests.append((list(prompt_ids), options))
        await asyncio.sleep(0)  # an engine's answer always comes later
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids, logprobs, versions, reason, *routes = answer
        expanded = getattr(self, "expanded", list(prompt_ids))
        return Sampled(
            np.array(ids), np.array(logprobs), np.array(versions), reason, expanded, *routes
        )


def recorder(engine: Scripted, max_length: int = 32) -> Recorder:
    sampling = SamplingConfig(max_new_tokens=4)
    return Recorder(engine.generate, Prompt("p", 0, (5, 6)), sampling, max_length, (1, "p", 0), str)


def play(context: Recorder, *calls) -> None:
    async def run():
        for ids in calls:
            await context.generate(ids)

    asyncio.run(run())


FIRST = ([7, 8], [-0.5, -0.25], [3, 4], "stop")
SECOND = ([10], [-2.0], [5], "stop")


def test_a_turn_keeps_ids_log_probabilities_and_versions_in_place():
    context = recorder(Scripted(FIRST))
    play(context, [5, 6])
    (row,) = context.trajectories()
    assert row.token_ids.tolist() == [5, 6, 7, 8]
    assert row.action_mask.tolist() == [False, False, True, True]
    assert row.logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert row.versions.tolist() == [-1, -1, 3, 4]
    assert row.prompt_length == 2
    assert context.tokens_generated == 2


def test_a_call_that_extends_the_ids_goes_on_in_the_segment_with_the_observation_masked():
    context = recorder(Scripted(FIRST, SECOND))
    play(context, [5, 6], [5, 6, 7, 8, 9])
    (row,) = context.trajectories()
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert row.action_mask.tolist() == [False, False, True, True, False, True]
    assert row.versions.tolist() == [-1, -1, 3, 4, -1, 5]
    assert [(turn.start, turn.stop) for turn in row.turns] == [(2, 4), (5, 6)]


def test_a_trajectory_keeps_the_patches_of_an_image_and_not_its_pixels():
    """A trainer reads patches alone; pixels would travel with every rollout and lie in every checkpoint."""
    image = ImageInput(np.zeros((4, 4, 3), np.uint8), np.ones((4, 12), np.float32), (1, 2, 2), 1, 1)
    engine, seen = Scripted(FIRST), []

    async def generate(ids, images, **options):
        seen.extend(images)
        return await engine.generate(ids, images, **options)

    context = recorder(engine)
    context._generate = generate
    asyncio.run(context.generate([5, 6], [image]))
    (kept,) = context.trajectories()[0].images
    assert seen[0].pixels is image.pixels
    assert kept.pixels is None and kept.patches is image.patches
    assert (kept.grid_thw, kept.start, kept.length) == ((1, 2, 2), 1, 1)


def test_a_history_that_was_rewritten_starts_a_new_segment():
    context = recorder(Scripted(FIRST, SECOND))
    play(context, [5, 6], [5, 6, 7, 99])
    first, second = context.trajectories()
    assert first.token_ids.tolist() == [5, 6, 7, 8]
    assert second.token_ids.tolist() == [5, 6, 7, 99, 10]
    assert second.action_mask.tolist() == [False] * 4 + [True]


def test_branches_that_take_turns_each_go_on_in_their_own_segment():
    left, right = ([7], [-1.0], [0], "stop"), ([8], [-1.0], [0], "stop")
    context = recorder(Scripted(left, right, left, right))
    play(context, [5, 6], [5, 9], [5, 6, 7, 20], [5, 9, 8, 30])
    rows = [row.token_ids.tolist() for row in context.trajectories()]
    assert rows == [[5, 6, 7, 20, 7], [5, 9, 8, 30, 8]]


def test_of_two_segments_that_a_call_extends_the_longer_goes_on():
    same = ([7], [-1.0], [0], "stop")
    context = recorder(Scripted(same, same, SECOND))

    async def both_then_one():
        await asyncio.gather(context.generate([5, 6, 7]), context.generate([5, 6]))
        await context.generate([5, 6, 7, 7])

    asyncio.run(both_then_one())
    rows = [row.token_ids.tolist() for row in context.trajectories()]
    assert rows == [[5, 6, 7, 7, 10], [5, 6, 7]]


def routes(*experts: int) -> np.ndarray:
    """One layer, two experts a token: the one named and the next."""
    return np.array([[[expert, expert + 1]] for expert in experts], np.int16)


def test_routes_lie_at_the_tokens_that_were_computed_and_those_of_an_earlier_turn_stay():
    context = recorder(
        Scripted((*FIRST, routes(1, 2, 3)), (*SECOND, routes(91, 92, 93, 4, 5))),
    )
    play(context, [5, 6], [5, 6, 7, 8, 9])
    (row,) = context.trajectories()
    assert row.routed_experts[:, 0, 0].tolist() == [1, 2, 3, 4, 5, -1]
    assert row.routed_experts[:, 0, 1].tolist() == [2, 3, 4, 5, 6, -1]


def test_a_new_segment_has_routes_of_its_own():
    context = recorder(Scripted((*FIRST, routes(1, 2, 3)), (*SECOND, routes(6, 7, 8, 9))))
    play(context, [5, 6], [5, 6, 7, 99])
    first, second = context.trajectories()
    assert first.routed_experts[:, 0, 0].tolist() == [1, 2, 3, -1]
    assert second.routed_experts[:, 0, 0].tolist() == [6, 7, 8, 9, -1]


def test_a_failed_call_leaves_the_rollout_as_it_was():
    context = recorder(Scripted(FIRST, RuntimeError("lost"), SECOND))
    play(context, [5, 6])
    with pytest.raises(RuntimeError, match="lost"):
        play(context, [5, 6, 7, 8, 9])
    play(context, [5, 6, 7, 8, 9])
    (row,) = context.trajectories()
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert context.tokens_generated == 3


def test_calls_side_by_side_never_share_a_segment_and_have_seeds_of_their_own():
    engine = Scripted(FIRST, SECOND, SECOND)
    context = recorder(engine)
    play(context, [5, 6])

    async def both():
        branches = ([5, 6, 7, 8, 20], [5, 6, 7, 8, 30])
        await asyncio.gather(*(context.generate(ids) for ids in branches))

    asyncio.run(both())
    rows = [row.token_ids.tolist() for row in context.trajectories()]
    assert rows == [[5, 6, 7, 8, 20, 10], [5, 6, 7, 8, 30, 10]]
    assert len({options["seed"] for _, options in engine.requests}) == 3


def test_a_failure_of_the_engine_that_the_agent_swallowed_comes_back():
    context = recorder(Scripted(EngineError("dead")))
    with pytest.raises(EngineError):
        play(context, [5, 6])
    with pytest.raises(EngineError, match="dead"):
        context.trajectories()


def test_no_room_asks_the_engine_for_nothing():
    engine = Scripted()
    context = recorder(engine, max_length=3)
    generation = asyncio.run(context.generate([5, 6, 7]))
    assert (generation.token_ids, generation.finish_reason) == ((), "length")
    assert engine.requests == [] and context.trajectories() == ()


def test_a_request_is_cut_to_the_room_left():
    engine = Scripted(FIRST)
    play(recorder(engine, max_length=4), [5, 6])
    assert engine.requests[0][1]["max_new_tokens"] == 2


def test_a_prompt_that_the_engine_expands_otherwise_is_refused():
    engine = Scripted(FIRST)
    engine.expanded = [5, 6, 6]
    with pytest.raises(ContractError, match="3 and 2 tokens"):
        play(recorder(engine), [5, 6])


def test_request_seeds_differ_by_every_part_of_their_key():
    keys = [(0, "p", 0, 0, 0), (1, "p", 0, 0, 0), (0, "q", 0, 0, 0), (0, "p", 1, 0, 0)]
    keys += [(0, "p", 0, 1, 0), (0, "p", 0, 0, 1), (0, "p", 0, 0, 10)]
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == [request_seed(*key) for key in keys]


def output(ids, logprobs, spans):
    """The part of vLLM's RequestOutput that is read; each token's dictionary holds a more likely token as well."""
    entries = [
        {token: SimpleNamespace(logprob=value), token + 1: SimpleNamespace(logprob=-0.01)}
        for token, value in zip(ids, logprobs)
    ]
    spans = [SimpleNamespace(start=a, end=b, version=v) for a, b, v in spans]
    completion = SimpleNamespace(
        token_ids=ids, logprobs=entries, weight_versions=spans, finish_reason="stop"
    )
    return SimpleNamespace(outputs=[completion], prompt_token_ids=[5, 6])


def test_log_probabilities_are_of_the_sampled_ids_and_versions_of_their_spans():
    sampled = _sampled(output([7, 9, 11], [-1.0, -2.0, -3.0], [(0, 2, "4"), (2, 3, "5")]))
    assert sampled.logprobs.tolist() == [-1, -2, -3]
    assert sampled.versions.tolist() == [4, 4, 5]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_probability_that_is_no_number_is_told_with_the_version_of_its_weights(value):
    answer = output([7, 9, 11], [-1.0, value, value], [(0, 1, "4"), (1, 2, "5"), (2, 3, "6")])
    with pytest.raises(NotFinite, match=f"log-probability {value}, version 5") as raised:
        _sampled(answer)
    crossed = pickle.loads(pickle.dumps(raised.value))  # as it comes out of an actor
    assert (crossed.version, crossed.batch, str(crossed)) == (5, {}, str(raised.value))


def test_a_token_without_a_version_is_refused():
    with pytest.raises(ContractError, match="without a policy version"):
        _sampled(output([7, 9], [-1.0, -2.0], [(0, 1, "4")]))


def test_routes_are_of_the_layers_with_experts_and_of_every_computed_position():
    answer = output([7, 9], [-1.0, -2.0], [(0, 2, "4")])
    assert _sampled(answer).routed_experts is None
    answer.outputs[0].routed_experts = np.arange(3 * 4 * 2, dtype=np.uint8).reshape(3, 4, 2)
    found = _sampled(answer, (1, 3)).routed_experts
    assert found.tolist() == [[[2, 3], [6, 7]], [[10, 11], [14, 15]], [[18, 19], [22, 23]]]
    answer.outputs[0].routed_experts = answer.outputs[0].routed_experts[1:]
    with pytest.raises(ContractError, match="routes of 2 positions, it computed 3"):
        _sampled(answer, (1, 3))
    answer.outputs[0].routed_experts = None
    with pytest.raises(ContractError, match="routes of 0 positions, it computed 3"):
        _sampled(answer, (1, 3))


def test_a_token_without_a_log_probability_is_refused():
    incomplete = output([7, 9], [-1.0, -2.0], [(0, 2, "4")])
    incomplete.outputs[0].logprobs.pop()
    with pytest.raises(ContractError, match="without a log-probability each"):
        _sampled(incomplete)
