"""A batch cut over ranks and micro-batches: every row once, nothing dropped, every rank with equally many micro-batches.

How it is cut changes time and memory and nothing else: tokens have been weighed before (``algo/aggregation.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from molt_core.algo.aggregation import WeightedRollout
from molt_core.config import TrainerConfig
from molt_core.types import NOT_SAMPLED, Trajectory

Split = list[list[list[int]]]
"""Indices of units: ``split[rank][micro_batch]``. A micro-batch may be empty."""


def shares(
    rollouts: Sequence[WeightedRollout], data_size: int, trainer: TrainerConfig
) -> list[list[list[WeightedRollout]]]:
    """The micro-batches of each rank, equally many and none empty: a token that nobody sampled fills up a short share.

    Raises ValueError where a rollout has another number of advantages or weights than of sampled tokens.
    """
    for number, rollout in enumerate(rollouts):
        found = len(rollout.advantages), len(rollout.weights)
        if found != 2 * (rollout.action_tokens,):
            raise ValueError(
                f"rollout {number}: {found[0]} advantages and {found[1]} weights for {rollout.action_tokens} sampled tokens"
            )
    first = rollouts[0]
    arrays = (None if array is None else array[:0] for array in first[1:])
    filler = WeightedRollout((filler_row(first.segments[0]),), *arrays)
    split = split_units(
        [rollout.tokens_forward for rollout in rollouts],
        data_size,
        max_rows=trainer.micro_batch_rows,
        max_tokens=trainer.max_tokens_per_micro_batch,
        rows=[len(rollout.segments) for rollout in rollouts],
    )
    return [[[rollouts[i] for i in part] or [filler] for part in share] for share in split]


def split_rows(rows: Sequence[Trajectory], data_size: int, trainer: TrainerConfig) -> Split:
    """Of rows that need not stay together."""
    return split_units(
        [len(row.token_ids) for row in rows],
        data_size,
        max_rows=trainer.micro_batch_rows,
        max_tokens=trainer.max_tokens_per_micro_batch,
    )


def split_units(
    lengths: Sequence[int],
    data_size: int,
    *,
    max_rows: int,
    max_tokens: int | None = None,
    rows: Sequence[int] | None = None,
) -> Split:
    """Units of ``lengths`` tokens in ``rows`` rows (one each, where not given) to ranks and micro-batches.

    Longest first, each to the rank with the fewest tokens; then, rank by rank, each into the first micro-batch that it fits
    into: at most ``max_rows`` rows and ``max_tokens`` tokens. A unit that is larger than that is a micro-batch of its own.
    """
    rows = [1] * len(lengths) if rows is None else rows
    most = sum(lengths) if max_tokens is None else max_tokens
    ranks: list[list[int]] = [[] for _ in range(data_size)]
    tokens = [0] * data_size
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(data_size), key=lambda r: (tokens[r], r))
        ranks[rank].append(index)
        tokens[rank] += lengths[index]
    split = [_first_fit(share, lengths, rows, most, max_rows) for share in ranks]
    count = max(1, *map(len, split))
    return [share + [[] for _ in range(count - len(share))] for share in split]


def _first_fit(
    share: Sequence[int],
    lengths: Sequence[int],
    rows: Sequence[int],
    max_tokens: int,
    max_rows: int,
) -> list[list[int]]:
    def fits(part: list[int]) -> bool:
        return (
            sum(lengths[i] for i in part) <= max_tokens and sum(rows[i] for i in part) <= max_rows
        )

    parts: list[list[int]] = []
    for index in share:
        room = next((part for part in parts if fits([*part, index])), None)
        if room is None:
            parts.append([index])
        else:
            room.append(index)
    return parts


def filler_row(row: Trajectory) -> Trajectory:
    """The row's first token as mere context: the least that a rank without rows can take part with. No sum counts it."""
    return Trajectory(
        token_ids=row.token_ids[:1],
        prompt_length=1,
        action_mask=np.zeros(1, bool),
        logprobs=np.zeros(1, np.float32),
        versions=np.full(1, NOT_SAMPLED, np.int32),
        mixed=np.zeros(1, bool),
        turns=(),
    )
