"""Places of engines and trainer ranks: on which nodes, and what is said where there is no room."""

from __future__ import annotations

import asyncio

import pytest

from molt_core import placement
from molt_core.config import RunConfig
from molt_core.placement import Node, PlacementError, plan, reserve


def config(ranks: int, engines: int, tensor_parallel: int = 1, device="cpu", where="apart"):
    trainer = {"world_size": ranks, "device": device}
    engine = {"count": engines, "tensor_parallel": tensor_parallel, "device": device}
    return RunConfig.model_validate(
        {
            "model": {"path": "policy"},
            "task": {"source": "shapes"},
            "trainer": trainer,
            "engine": {**engine, "placement": where},
        }
    )


def nodes(*sizes: tuple[float, float]) -> list[Node]:
    return [Node(f"id{n}", f"node{n}", *size) for n, size in enumerate(sizes, start=1)]


def named(found) -> tuple[list[str], list[str]]:
    return [node.name for node in found.ranks], [node.name for node in found.engines]


def test_two_nodes_of_eight_devices_train_on_one_and_generate_on_the_other():
    found = plan(config(8, 4, 2, "cuda"), nodes((96, 8), (96, 8)))
    assert named(found) == (["node2"] * 8, ["node1"] * 4)


def test_ranks_lie_together_and_engines_elsewhere():
    assert named(plan(config(2, 1), nodes((2, 0), (2, 0)))) == (["node2"] * 2, ["node1"])
    assert named(plan(config(2, 1), nodes((2, 0), (3, 0), (2, 0)))) == (["node3"] * 2, ["node1"])


def test_a_separate_critic_has_places_of_its_own():
    critic = {"algorithm": {"advantage": "gae"}, "critic": {"placement": "separate"}}
    both = RunConfig.model_validate(config(2, 1).model_dump() | critic)
    assert len(plan(both, nodes((5, 0))).ranks) == 4
    with pytest.raises(PlacementError, match="no room for 4 trainer ranks"):
        plan(both, nodes((4, 0)))


def test_ranks_take_the_node_with_most_room():
    assert named(plan(config(3, 1), nodes((2, 0), (4, 0), (2, 0)))) == (["node2"] * 3, ["node1"])


def test_engines_share_the_ranks_node_where_asked_to():
    assert named(plan(config(2, 1, where="together"), nodes((4, 0), (4, 0)))) == (
        ["node2"] * 2,
        ["node2"],
    )


def test_one_node_holds_all():
    assert named(plan(config(2, 2), nodes((4, 0)))) == (["node1"] * 2, ["node1"] * 2)


def test_engines_that_need_whole_pairs_of_devices_go_first_where_ranks_would_break_them():
    # Ranks together would leave 1 and 3 devices, room for one engine of two.
    assert named(plan(config(2, 2, 2, "cuda"), nodes((8, 3), (8, 3)))) == (
        ["node2", "node1"],
        ["node1", "node2"],
    )


def test_too_small_a_cluster_is_an_error_that_says_what_is_there():
    with pytest.raises(PlacementError) as error:
        plan(config(4, 2, 2, "cuda"), nodes((96, 2), (96, 4)))
    assert "no room for 4 trainer ranks of 1 CPU and 1 GPU and 2 engines of 1 CPU and 2 GPU" in str(
        error.value
    )
    assert "node1 (96 CPU and 2 GPU), node2 (96 CPU and 4 GPU)" in str(error.value)


@pytest.mark.engine
def test_places_that_something_else_holds_are_an_error_and_no_endless_wait(
    ray_session, monkeypatch
):

    async def twice():
        import ray

        cpus = int(ray.cluster_resources()["CPU"])
        async with reserve(config(cpus - 1, 1)) as places:
            assert len(places.names()["trainer"]) == cpus - 1
            with monkeypatch.context() as patch:
                patch.setattr(placement, "FREE_WITHIN_S", 1.0)
                with pytest.raises(PlacementError, match="did not become free within 1 s"):
                    async with reserve(config(1, 1)):
                        raise AssertionError("there was no room")
        async with reserve(config(1, 1)) as places:  # what was held is free again
            return places.names()

    found = asyncio.run(twice())
    assert len(found["trainer"]) == len(found["engine"]) == 1
