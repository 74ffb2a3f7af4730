"""Which runs belong together, where the plan declares a pairing unit.

A seed shares data order, task instances and request seeds between the arms, so a learning endpoint may pair by it. Two
runs take alike long because they ran one after the other on one machine, not because of their seed: a time pairs by time
block, and only where the runs of a block really did start next to each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from analysis.checks import Pair
from analysis.endpoint import Endpoint

Seeds = tuple[tuple[int, ...], tuple[int, ...]]


def pair_up(
    pair: Pair, endpoint: Endpoint, values: Mapping[str, Mapping[int, float]]
) -> tuple[bool, Seeds, str]:
    """(paired, seeds per arm in the order compared, what must be said about it).

    Without a declared unit, or where time blocks were torn apart, every run counts by itself.
    """
    ours, theirs = (tuple(sorted(values[name])) for name in pair.names)
    if pair.plan.pairing_unit is None:
        return False, (ours, theirs), ""
    shared = tuple(seed for seed in ours if seed in theirs)
    if endpoint.kind == "speed":
        torn = torn_blocks(pair, shared)
        if torn:
            text = ", ".join(map(str, torn))
            return (
                False,
                (ours, theirs),
                (
                    f"not paired: the runs of seed {text} did not start one after the other, so they share no time block"
                ),
            )
    alone = sorted(set(ours) ^ set(theirs))
    note = (
        f"seed {', '.join(map(str, alone))} has no partner and is left out of the pairs"
        if alone
        else ""
    )
    return True, (shared, shared), note


def torn_blocks(pair: Pair, seeds: tuple[int, ...]) -> list[int]:
    """Seeds between whose two starts another run of the comparison started, or whose start is not recorded."""
    starts: dict[tuple[str, int], float] = {}
    for name, runs in pair.arms.items():
        for run in runs:
            if "time_unix" in run.metrics and run.metrics["time_unix"].notna().any():
                starts[name, run.seed] = float(run.metrics["time_unix"].min())
    order = sorted(starts, key=starts.get)
    place = {key: position for position, key in enumerate(order)}
    first, second = pair.names
    return [
        seed
        for seed in seeds
        if (first, seed) not in place
        or (second, seed) not in place
        or abs(place[first, seed] - place[second, seed]) != 1
    ]
