"""The objective does not depend on the layout: one table of backends, world sizes and cuts, against one plain trainer.

Tolerances, float32: loss and gradient norm within 1e-5 of themselves, the relative size of the last step within 1e-4, every
weight after three steps within 5e-6; the steps move weights by up to 3e-3.
"""

import multiprocessing

import pytest
import torch

from molt_core.models.tiny import build_tiny_qwen3_moe
from tests.harness.layout_ranks import BACKENDS, CUTS, TEXT, WORLDS, rows_of, run
from tests.harness.trainer_cases import (
    free_port,
    largest_difference,
    oracle_training,
    rescaled_checkpoint,
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """What the plain trainer found, by cut; and by world size what every rank found for every backend and cut."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("layouts")
    policies = {
        "all rows": rescaled_checkpoint(out),
        TEXT: rescaled_checkpoint(out / "text", build_tiny_qwen3_moe),
    }
    trained = {cut: oracle_training(p, rows_of(cut, p)) for cut, p in policies.items()}
    checkpoints = {cut: policies.get(cut, policies["all rows"]) for cut in CUTS}
    multiprocessing.set_forkserver_preload([run.__module__])
    found = {}
    for world in WORLDS:
        torch.multiprocessing.start_processes(
            run, (world, free_port(), checkpoints, out), nprocs=world, start_method="forkserver"
        )
        found[world] = [torch.load(out / f"{world}-{rank}.pt") for rank in range(world)]
    return {cut: trained.get(cut, trained["all rows"]) for cut in CUTS}, found


@pytest.mark.distributed
@pytest.mark.parametrize("world, cut", [(w, cut) for w, cuts in WORLDS.items() for cut in cuts])
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_norm_and_weights_equal_the_plain_trainers(table, backend, cut, world):
    oracle, found = table[0][cut], table[1]
    for rank in found[world]:
        losses, norms, weights, update_ratio = rank[backend, cut]
        assert losses == pytest.approx(oracle.losses, rel=1e-5)
        assert norms == pytest.approx(oracle.norms, rel=1e-5)
        assert largest_difference(weights, oracle.weights) < 5e-6
        assert update_ratio == pytest.approx(oracle.update_ratio, rel=1e-4)
