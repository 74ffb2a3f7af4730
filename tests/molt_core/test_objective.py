"""The shared objective: the sampled distribution, one weighted sum whatever the split, rollouts none of which is lost."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_core.algo.aggregation import WeightedRollout
from molt_core.algo.config import AlgorithmConfig
from molt_core.train.collate import MicroBatch
from molt_core.train.logprobs import ActionDistribution, action_logprobs
from molt_core.train.objective import (
    forward_backward,
    score,
    split_rows,
    without_actions,
)
from tests.molt_core.make import trajectory

NOTHING = torch.tensor([], dtype=torch.long)


class Bigram:
    """The least policy there is: the next token's logits are a row of a table. A TrainBackend less what is not used here."""

    def __init__(self, gap: torch.Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(12, 12, generator=generator).requires_grad_()
        self.gap = gap

    def action_logprobs(self, batch: MicroBatch, distribution: ActionDistribution):
        before = batch.token_ids[batch.action_positions - 1]
        return action_logprobs(torch.eye(12)[before], self.table.T, batch.action_ids, distribution)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        loss.backward()

    def router_gap(self) -> torch.Tensor | None:
        return self.gap


ALGORITHM = AlgorithmConfig()
LENGTHS = (1, 4, 2, 5, 3)
ROWS = [trajectory(prompt=3, actions=n, logprob=-2.0 - n / 10) for n in LENGTHS]
ADVANTAGES = [np.full(n, 1.0 - n / 3, np.float32) for n in LENGTHS]
ROLLOUTS = [
    WeightedRollout(
        (row,),
        values,
        np.full(len(values), 1 / 15, np.float32),
        np.full(len(values), -2.2, np.float32),
    )
    for row, values in zip(ROWS, ADVANTAGES)
]


def train(
    shares: Iterator, algorithm: AlgorithmConfig = ALGORITHM
) -> tuple[dict[str, float], torch.Tensor]:
    """Sums and gradient, both added up over the ranks whose micro-batches ``shares`` gives."""
    sums: dict[str, float] = {}
    gradient = torch.zeros(12, 12)
    for micro_batches in shares:
        backend = Bigram()
        of_rank = forward_backward(
            backend,
            [[ROLLOUTS[i] for i in m] for m in micro_batches],
            algorithm=algorithm,
            distribution=ActionDistribution(1.3, torch.tensor([0])),
        )
        gradient += backend.table.grad
        for name, value in of_rank.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums, gradient


def test_the_gradient_is_the_mean_over_all_action_tokens():
    # At ratio 1 with the sampled weights truncated at 2: d loss = -sum_n w_n A_n d log pi(n) / 15, written out naively.
    _, gradient = train([[[0, 1, 2, 3, 4]]])
    table = Bigram().table
    total = 0.0
    for row, advantages in zip(ROWS, ADVANTAGES):
        for place, advantage in zip(np.flatnonzero(row.action_mask), advantages):
            logits = table[int(row.token_ids[place - 1])] / 1.3
            logprob = logits[int(row.token_ids[place])] - logits[1:].logsumexp(0)
            weight = min(math.exp(logprob.item() - row.logprobs[place]), 2.0)
            total = total - weight * float(advantage) * logprob / 15
    torch.testing.assert_close(gradient, torch.autograd.grad(total, table)[0])


@pytest.mark.parametrize(
    "shares",
    [
        [[[0], [1], [2], [3], [4]]],
        [[[3, 4], [0, 1, 2]]],
        [[[0, 1]], [[2, 3, 4]]],
        [[[0], [1]], [[2, 3], [4]]],
        [[[4]], [[3]], [[2]], [[0, 1]]],
    ],
    ids=["five micro-batches", "two uneven", "two ranks", "two ranks of two", "four ranks"],
)
def test_loss_gradient_and_sums_do_not_depend_on_the_split(shares):
    whole_sums, whole_gradient = train([[[0, 1, 2, 3, 4]]])
    sums, gradient = train(shares)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-7)
    assert sums == pytest.approx(whole_sums, rel=1e-5)


def test_a_filler_row_adds_nothing():
    backend = Bigram()
    sums = forward_backward(
        backend,
        [[WeightedRollout((without_actions(ROWS[0]),), *np.zeros((2, 0), np.float32))]],
        algorithm=ALGORITHM,
        distribution=ActionDistribution(1.0, NOTHING),
    )
    assert sums["tokens"] == 0 and sums["loss"] == 0
    assert not backend.table.grad.any()


def test_tokens_from_the_first_router_tie_on_are_tied():
    # Prompt of 3 and 4 actions at columns 3..6; the router ties at column 4, which predicts column 5.
    gap = torch.ones(7)
    gap[4] = 1e-7
    options = dict(distribution=ActionDistribution(1.0, NOTHING), tie_gap=1e-5)
    _, _, tied = score(Bigram(gap), [trajectory(prompt=3, actions=4)], **options)
    assert tied.tolist() == [False, False, True, True]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    data_size=st.integers(1, 5),
    micro_batch_rows=st.integers(1, 9),
)
def test_every_row_goes_to_one_rank_and_ranks_have_equally_many_micro_batches(
    lengths, data_size, micro_batch_rows
):
    shares = split_rows(lengths, data_size, micro_batch_rows)
    assert len(shares) == data_size
    assert len({len(share) for share in shares}) == 1
    assert max(len(m) for share in shares for m in share) <= micro_batch_rows
    assert sorted(i for share in shares for m in share for i in m) == list(range(len(lengths)))
