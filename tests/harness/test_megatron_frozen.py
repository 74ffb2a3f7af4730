"""Policies that are scored and never stepped, under the Megatron-Core trainer: the reference of a KL penalty, and a teacher."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist

from harness.baselines.megatron_core import parallel_state
from molt_core.config import RunConfig
from molt_core.models.load import load_policy
from molt_core.train.collate import collate
from molt_core.train.worker import TrainerRank
from tests.harness.trainer_cases import (
    free_port,
    oracle_logits,
    rescaled_checkpoint,
    token_logprobs,
)
from tests.molt_core.test_worker import batch, logprobs, on_policy, rollouts_of, score_of, step


@pytest.fixture
def start(tiny_checkpoint):
    """Starts one rank with Megatron-Core's trainer."""
    torch.set_num_threads(1)

    def start(**algorithm) -> TrainerRank:
        config = RunConfig.model_validate(
            {
                "model": {"builtin": "tiny-qwen3-vl-moe"},
                "task": {"source": "shapes"},
                "algorithm": algorithm,
                "trainer": {
                    "backend": "harness.baselines.megatron_core:MegatronCoreBackend",
                    "micro_batch_rows": 3,
                },
                "loop": {"max_staleness": 0},
            }
        )
        rank = TrainerRank(0, config, tiny_checkpoint)
        rank.start("127.0.0.1", free_port())
        return rank

    yield start
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@torch.no_grad()
def by_transformers(checkpoint, rank: TrainerRank, found) -> np.ndarray:
    """What transformers' own forward pass gives the batch's sampled tokens, under the sampling distribution."""
    rows = [segment for group in found.groups for segment in group.segments]
    logits = oracle_logits(load_policy(checkpoint), rows)
    logits[:, rank.distribution.excluded_ids] = -torch.inf
    return token_logprobs(logits, collate(rows)).numpy()


def test_the_reference_is_the_initial_policy_and_stays_it_while_the_policy_moves(
    start, tiny_checkpoint
):
    rank = start(kl={"coef": 0.1})
    found = on_policy(rank, batch(tiny_checkpoint))
    expected = by_transformers(tiny_checkpoint, rank, found)
    first = logprobs(rank, found)["reference"]
    np.testing.assert_allclose(first, expected, rtol=0, atol=1e-5)
    assert step(rank, rollouts_of(rank, found)).sums["kl_reference"] == pytest.approx(0, abs=1e-5)
    assert np.array_equal(logprobs(rank, found)["reference"], first)
    assert np.abs(score_of(rank, found) - expected).max() > 1e-3
    assert step(rank, rollouts_of(rank, found)).sums["kl_reference"] > 1e-4


def storages() -> dict[int, int]:
    """Bytes of every tensor's memory in this process, once each."""
    gc.collect()
    tensors = [
        held for held in gc.get_objects() if type(held) in (torch.Tensor, torch.nn.Parameter)
    ]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_the_reference_is_weights_alone(start, tiny_checkpoint):
    rank, added = start(), {}
    for steps in (0, 1):
        before = storages()
        backend = rank._backend(tiny_checkpoint, rank.config.model, steps)
        added[steps] = sum(size for place, size in storages().items() if place not in before)
    weights = sum(parameter.nbytes for parameter in backend.model.parameters())
    assert weights < added[0] < 1.05 * weights
    assert added[1] > 1.95 * weights  # gradients at least; AdamW's moments come with its first step


def test_the_teacher_is_another_policy_and_distillation_moves_towards_it(
    start, tiny_checkpoint, tmp_path
):
    teacher = rescaled_checkpoint(tmp_path)
    rank = start(advantage="on_policy_distillation", teacher=str(teacher), loss="policy_gradient")
    found = batch(tiny_checkpoint)
    expected = by_transformers(teacher, rank, found)
    distances = []
    for _ in range(8):
        np.testing.assert_allclose(logprobs(rank, found)["teacher"], expected, rtol=0, atol=1e-5)
        rollouts = rollouts_of(rank, on_policy(rank, found))
        distances.append(sum(float(abs(r.advantages).sum()) for r in rollouts))
        step(rank, rollouts)
    assert distances[-1] < 0.8 * distances[0]
