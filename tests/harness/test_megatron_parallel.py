"""Megatron-Core over several ranks equals one rank, in every layout that is not refused."""

import multiprocessing

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from harness.baselines.megatron_layout import Layout
from molt_core.models.load import load_policy
from molt_core.train.collate import collate
from tests.harness.megatron_ranks import train
from tests.harness.trainer_cases import (
    assert_saved_form,
    free_port,
    largest_difference,
    oracle_logits,
    oracle_training,
    rescaled_checkpoint,
    save_form,
    token_logprobs,
    trajectories,
    with_random_records,
)

MIXED = (1, 2, 0, 1, 0, 3, 0)
TWO_RANKS = {
    "ep2": {"expert_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
    "tp2-etp2": {"tensor_parallel": 2},
    "dp2": {},
}
FOUR_RANKS = {"tp2-ep2-dp2": TWO_RANKS["tp2-ep2"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return rescaled_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def text(checkpoint):
    return AutoConfig.from_pretrained(checkpoint).text_config


@pytest.fixture(scope="module")
def policy(checkpoint):
    return load_policy(checkpoint)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    torch.set_num_threads(1)
    return oracle_training(checkpoint, trajectories(checkpoint, MIXED))


@pytest.fixture(scope="module")
def results(checkpoint, oracle, tmp_path_factory):
    """Layout to what each of its ranks saw; all layouts of a world size share one start of its processes."""
    out = tmp_path_factory.mktemp("ranks")
    save_form(oracle.before_last, out / "plain")
    multiprocessing.set_forkserver_preload([train.__module__])  # Megatron is imported once
    found = {"out": out}
    for world_size, layouts in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        arguments = (world_size, free_port(), checkpoint, MIXED, layouts, out)
        torch.multiprocessing.start_processes(
            train, arguments, nprocs=world_size, start_method="forkserver"
        )
        for name in layouts:
            found[name] = [
                torch.load(out / f"{name}-{rank}.pt", weights_only=False)
                for rank in range(world_size)
            ]
    return found


every_layout = pytest.mark.parametrize("layout", [*TWO_RANKS, *FOUR_RANKS])


@pytest.mark.distributed
@every_layout
def test_steps_equal_one_process(results, oracle, layout):
    """One process equals transformers with AdamW (test_megatron_core); so must these."""
    for rank in results[layout]:
        np.testing.assert_allclose(rank["norms"], oracle[0], rtol=1e-5)
        np.testing.assert_allclose(rank["update_ratio"], oracle.update_ratio, rtol=1e-4)
        assert largest_difference(rank["weights"], oracle[1], dimensions=2) < 5e-6
        assert largest_difference(rank["weights"], oracle[1], dimensions=1) < 5e-6


@pytest.mark.distributed
@every_layout
def test_rank_0_gives_out_in_slices_what_every_rank_holds_a_part_of(results, policy, layout):
    loaded = dict(policy.named_parameters())
    for rank in results[layout]:
        assert largest_difference(rank["untouched"], loaded) == 0
        assert largest_difference(rank["held"], rank["weights"]) == 0


@pytest.mark.distributed
@every_layout
def test_data_ranks_share_the_rows_and_score_them_like_transformers(results, policy, layout):
    ranks = results[layout]
    size = ranks[0]["data"][1]
    assert size == len(ranks) // (2 if layout.startswith("tp2") else 1)
    assert {rank["data"] for rank in ranks} == {(number, size) for number in range(size)}
    for rank in ranks:
        for (rows, logprobs, choices), replayed in zip(rank["scores"], rank["replayed"]):
            batch = collate(rows)
            with torch.no_grad():
                expected = token_logprobs(oracle_logits(policy, rows), batch)
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
            assert all(len(choice["chosen"]) == batch.tokens_forward for choice in choices)
            rows = with_random_records(rows)
            with torch.no_grad():
                expected = token_logprobs(oracle_logits(policy, rows), batch)
            torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=0)


@pytest.mark.distributed
@every_layout
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(results, layout):
    for rank in results[layout]:
        assert largest_difference(rank["resumed"], rank["weights"]) == 0


@pytest.mark.distributed
@every_layout
def test_every_layout_saves_what_the_plain_trainer_holds_and_goes_on_from_it(
    results, oracle, layout
):
    assert_saved_form(results["out"] / f"{layout}-checkpoint", oracle.before_last)
    for rank in results[layout]:
        assert largest_difference(rank["from_plain"], oracle.weights) < 5e-6


@pytest.mark.parametrize(
    "layout, world_size, message",
    [
        ({"tensor_parallel": 2, "expert_tensor_parallel": 1}, 2, "never sums the experts"),
        ({"expert_tensor_parallel": 2}, 2, "never sums the experts"),
        ({"pipeline_parallel": 2}, 2, "trainer.layout.pipeline_parallel is unknown"),
        ({"tensor_parallel": 0}, 1, "must be 1 or more"),
        ({"tensor_parallel": 2}, 3, "trainer.world_size, 3, cannot be cut 2 ways"),
        ({"expert_parallel": 4}, 2, "by the experts' degrees"),
        ({"tensor_parallel": 4}, 4, "key-value heads, 2, cannot be cut 4 ways"),
        ({"expert_parallel": 16}, 16, "experts, 8, cannot be cut 16 ways"),
    ],
)
def test_layouts_that_would_be_wrong_are_refused(text, layout, world_size, message):
    with pytest.raises(ValueError, match=message):
        Layout.of(layout, world_size, text)
