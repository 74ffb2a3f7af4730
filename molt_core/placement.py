"""Which node every engine and every trainer rank, a separate critic's too, lies on: decided here, held by one placement group.

Trainer ranks lie on as few nodes as possible; engines keep to nodes without ranks where there is room (``engine.placement``).
The plan is a pure function of what nodes have, so that a submit can check it too. Ray then reserves all places at once, each
on its node: a run has all that it needs, or an error that says what is missing, and never half of it for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from molt_core.config import RunConfig

FREE_WITHIN_S = 120.0
"""Longest wait for places that the cluster has and something else holds."""


class PlacementError(RuntimeError):
    """The cluster has no room for the run; the message says what was asked for and what is there."""


@dataclass(frozen=True)
class Node:
    """What a node has, or has left. ``id``: Ray's."""

    id: str
    name: str
    cpus: float
    gpus: float = 0.0

    def fits(self, place: Place) -> bool:
        return self.cpus >= place.cpus and self.gpus >= place.gpus


@dataclass(frozen=True)
class Place:
    """What one actor takes of a node."""

    what: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Plan:
    """The node of each place, in the order of ``places``."""

    ranks: tuple[Node, ...]
    engines: tuple[Node, ...]


def places(config: RunConfig) -> tuple[list[Place], list[Place]]:
    """(trainer ranks, engines). An engine is one place: its tensor-parallel workers share a node."""
    trainer, engine = config.trainer, config.engine
    rank_gpus = float(trainer.device == "cuda")
    engine_gpus = float(engine.tensor_parallel * (engine.device == "cuda"))
    return (
        [Place(f"trainer rank {n}", 1.0, rank_gpus) for n in range(config.trainer_processes)],
        [Place(f"engine {n}", 1.0, engine_gpus) for n in range(engine.count)],
    )


def plan(config: RunConfig, nodes: Sequence[Node]) -> Plan:
    """Put every place on a node. Raises PlacementError where there is no room for all.

    Engines that take several devices go first where that alone makes room: ranks, of one device each, fit what is left.
    """
    ranks, engines = places(config)
    for engines_first in (False, True):
        free = {node.id: node for node in nodes}
        if engines_first:
            on_engines = _put(engines, free, list(free))
            on_ranks = on_engines and _put(ranks, free, _packed(ranks, free))
        else:
            on_ranks = _put(ranks, free, _packed(ranks, free))
            on_engines = on_ranks and _put(engines, free, _order(config, on_ranks, free))
        if on_ranks and on_engines:
            by_id = {node.id: node for node in nodes}
            return Plan(tuple(by_id[i] for i in on_ranks), tuple(by_id[i] for i in on_engines))
    raise PlacementError(
        f"no room for {_words(ranks)} and {_words(engines)}; the cluster has "
        f"{', '.join(f'{n.name} ({_amount(n.cpus, n.gpus)})' for n in nodes) or 'no node'}"
    )


def _put(wanted: Sequence[Place], free: dict[str, Node], order: list[str]) -> list[str] | None:
    """Node ids for ``wanted``, each the first of ``order`` with room; takes it out of ``free``. None where one fits nowhere."""
    found = []
    for place in wanted:
        node = next((free[i] for i in order if free[i].fits(place)), None)
        if node is None:
            return None
        free[node.id] = replace(node, cpus=node.cpus - place.cpus, gpus=node.gpus - place.gpus)
        found.append(node.id)
    return found


def _packed(ranks: Sequence[Place], free: dict[str, Node]) -> list[str]:
    """Nodes with room for the most ranks first, so that few are needed; of equal ones the last: the first has the driver."""

    def room(node: Node) -> float:
        by_gpus = node.gpus // ranks[0].gpus if ranks[0].gpus else float("inf")
        return min(node.cpus // ranks[0].cpus, by_gpus, len(ranks))

    return sorted(reversed(free), key=lambda i: -room(free[i]))


def _order(config: RunConfig, taken: Sequence[str], free: dict[str, Node]) -> list[str]:
    """Where engines go: nodes without ranks first, or where ranks are first."""
    apart = config.engine.placement == "apart"
    return sorted(free, key=lambda i: (i in taken) == apart)


def _words(wanted: Sequence[Place]) -> str:
    kind = wanted[0].what.rpartition(" ")[0]
    each = _amount(wanted[0].cpus, wanted[0].gpus)
    return f"{len(wanted)} {kind}{'s' if len(wanted) > 1 else ''} of {each}"


def _amount(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")


@dataclass(frozen=True)
class Reserved:
    """Places that are held. ``options``: what a Ray actor needs to lie on its place."""

    plan: Plan
    ranks: list[dict[str, Any]]
    engines: list[dict[str, Any]]

    def names(self) -> dict[str, list[str]]:
        """Of ranks and engines, in order, the names of their nodes."""
        nodes = {"trainer": self.plan.ranks, "engine": self.plan.engines}
        return {what: [node.name for node in on] for what, on in nodes.items()}


@asynccontextmanager
async def reserve(config: RunConfig) -> AsyncIterator[Reserved]:
    """Hold the run's places in the Ray cluster that this process has joined; actors on them end with it.

    Raises PlacementError where the nodes have no room, or none that becomes free within FREE_WITHIN_S.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wanted = [place for kind in places(config) for place in kind]
    found = plan(config, ray_nodes())
    group = placement_group(
        [{"CPU": p.cpus, **({"GPU": p.gpus} if p.gpus else {})} for p in wanted],
        bundle_label_selector=[{"ray.io/node-id": n.id} for n in (*found.ranks, *found.engines)],
    )
    try:
        if not await asyncio.to_thread(group.wait, FREE_WITHIN_S):
            free = ray.available_resources()
            raise PlacementError(
                f"the run's {len(wanted)} places did not become free within {FREE_WITHIN_S:.0f} s: something else holds them; "
                f"free in all are {_amount(free.get('CPU', 0.0), free.get('GPU', 0.0))}"
            )
        options = [
            {
                "num_cpus": place.cpus,
                "num_gpus": place.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
            }
            for number, place in enumerate(wanted)
        ]
        yield Reserved(found, options[: len(found.ranks)], options[len(found.ranks) :])
    finally:
        remove_placement_group(group)


def ray_nodes() -> list[Node]:
    """The live nodes of this process's Ray cluster, the head first, then by name."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    head = "node:__internal_head__"
    alive.sort(key=lambda node: (head not in node["Resources"], node["NodeName"]))
    return [
        Node(
            node["NodeID"],
            node["NodeName"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in alive
    ]
