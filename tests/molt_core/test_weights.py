"""Weights leave their shards in slices: every bit of them arrives, and no rank holds more than a bucket or a row."""

import multiprocessing

import pytest
import torch

from molt_core.train.weights import held_rows
from tests.harness.trainer_cases import free_port
from tests.molt_core.weight_ranks import DTYPES, LIMIT, run, values

RANKS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(what arrived in an engine, whole weights, largest piece of memory) of each rank."""
    out = tmp_path_factory.mktemp("ranks")
    multiprocessing.set_forkserver_preload([run.__module__])
    torch.multiprocessing.start_processes(
        run, (RANKS, free_port(), out), nprocs=RANKS, start_method="forkserver"
    )
    return [torch.load(out / f"{rank}.pt") for rank in range(RANKS)]


def is_all(found: dict[str, torch.Tensor]) -> bool:
    whole = {name: value.to(DTYPES[name]) for name, value in values().items()}
    same = (found[n].dtype == w.dtype and torch.equal(found[n], w) for n, w in whole.items())
    return found.keys() == whole.keys() and all(same)


@pytest.mark.distributed
def test_unevenly_sharded_weights_arrive_in_an_engine_bit_for_bit(ranks):
    assert is_all(ranks[0][0])


@pytest.mark.distributed
def test_for_a_file_they_become_whole_on_rank_0_alone(ranks):
    assert is_all(ranks[0][1])
    assert [found for _, found, _ in ranks[1:]] == [{}] * (RANKS - 1)


@pytest.mark.distributed
def test_no_rank_takes_more_memory_at_once_than_a_bucket_or_a_larger_row(ranks):
    row, embedding = 300 * 4, 301 * 8 * 2
    assert row > LIMIT and embedding > 4 * LIMIT
    assert ranks[0][2] == row  # the bucket itself, once
    assert max(largest for _, _, largest in ranks[1:]) <= LIMIT


@pytest.mark.parametrize(
    "rows, start, stop", [(7, 0, 7), (7, 2, 4), (8, 5, 8), (1, 0, 1), (4, 1, 4)]
)
def test_held_rows_are_those_of_torch_chunk(rows, start, stop):
    whole = torch.arange(rows)
    chunks, found = whole.chunk(RANKS), torch.full((stop - start,), -1)
    for rank, own, place in held_rows(rows, RANKS, start, stop):
        assert found[place].numel() > 0
        found[place] = chunks[rank][own]
    assert torch.equal(found, whole[start:stop])
