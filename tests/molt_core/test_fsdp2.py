"""The FSDP2 trainer against transformers and torch's AdamW: one rank, two ranks with uneven shares, and after a restart."""

import math
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from molt_core.config import TrainerConfig
from molt_core.models.load import load_policy
from molt_core.train.backend import TrainBackend
from molt_core.train.collate import collate
from molt_core.train.fsdp2 import FSDP2Backend
from tests.harness.trainer_cases import (
    MODEL,
    OPTIMIZER,
    STEPS,
    advantages,
    assert_saved_form,
    backend_logprobs,
    backend_step,
    backend_training,
    disturbed_training,
    free_port,
    given_out,
    kept_bytes,
    largest_difference,
    oracle_logits,
    oracle_training,
    rescaled_checkpoint,
    save_form,
    share,
    token_logprobs,
    trajectories,
)

IMAGES = (1, 2, 0, 1, 0, 0)
"""Images in each row: with two ranks, one of them also gets a micro-batch without any."""


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return rescaled_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return oracle_training(checkpoint, trajectories(checkpoint, IMAGES))


def build(checkpoint: Path, **trainer) -> FSDP2Backend:
    return FSDP2Backend(checkpoint, MODEL, OPTIMIZER, TrainerConfig(**trainer), STEPS)


def micro_batches(checkpoint: Path, backend: TrainBackend, rows_each: int):
    rows, cut = trajectories(checkpoint, IMAGES), TrainerConfig(micro_batch_rows=rows_each)
    return share(rows, backend.data_rank, backend.data_size, cut)


def denominator(checkpoint: Path) -> int:
    return sum(row.action_tokens for row in trajectories(checkpoint, IMAGES))


def test_logprobs_of_rows_end_to_end_equal_transformers(checkpoint):
    rows = trajectories(checkpoint, IMAGES)
    batch = collate(rows)
    found = backend_logprobs(build(checkpoint), batch)
    with torch.no_grad():
        expected = token_logprobs(oracle_logits(load_policy(checkpoint), rows), batch)
    assert expected.std() > 0.1
    assert float((found - expected).abs().max()) < 1e-5


def test_a_step_on_nothing_on_no_number_or_withheld_leaves_no_trace(checkpoint, oracle):
    backend = build(checkpoint)
    norms, weights = disturbed_training(
        backend, micro_batches(checkpoint, backend, 3), denominator(checkpoint)
    )
    expected = [n for norm in oracle[0] for n in (math.nan, 0.0, 3 * norm, norm)]
    assert norms == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert largest_difference(weights, oracle[1]) < 5e-6


def test_one_rank_in_float32_computes_with_the_memory_that_it_steps(checkpoint):
    backend = build(checkpoint)
    share = micro_batches(checkpoint, backend, 3)
    backend_training(backend, share, denominator(checkpoint))
    stepped = {p.data_ptr() for group in backend.optimizer.param_groups for p in group["params"]}
    backend_logprobs(backend, collate(share[0][0]))
    assert {parameter.data_ptr() for parameter in backend.root.parameters()} == stepped


def test_activation_checkpointing_keeps_less_and_changes_no_step(checkpoint, oracle):
    batch = collate(trajectories(checkpoint, IMAGES))
    backend = build(checkpoint, activation_checkpointing=True)
    assert kept_bytes(backend, batch) < 0.6 * kept_bytes(build(checkpoint), batch)
    backend = build(checkpoint, activation_checkpointing=True)
    share = micro_batches(checkpoint, backend, 3)
    norms, weights = backend_training(backend, share, denominator(checkpoint))
    assert norms == pytest.approx(oracle[0], rel=1e-5)
    assert largest_difference(weights, oracle[1]) < 5e-6


@torch.no_grad()
def look(backend: FSDP2Backend, share) -> None:
    """Score rows as a run's probe does, which leaves gathered weights in the module."""
    backend_logprobs(backend, collate(share[0][0]))


def _rank(rank: int, port: int, checkpoint: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    backend = build(checkpoint, world_size=2)
    share = micro_batches(checkpoint, backend, 2)
    norms, weights = backend_training(backend, share, denominator(checkpoint))
    interrupted, resumed = build(checkpoint, world_size=2), build(checkpoint, world_size=2)
    for _ in range(STEPS - 1):
        backend_step(interrupted, share, denominator(checkpoint))
    look(interrupted, share)
    saving = interrupted.save(out / "state")
    backend_step(interrupted, share, denominator(checkpoint))  # must not reach what is being saved
    saving.result()
    again = []
    for folder in ("state", "alone"):
        look(resumed, share)
        resumed.load(out / folder)
        look(resumed, share)
        backend_step(resumed, share, denominator(checkpoint))
        again.append(given_out(resumed))
    torch.save((norms, weights, *again), out / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(checkpoint, tmp_path_factory):
    out, port = tmp_path_factory.mktemp("ranks"), free_port()
    alone = build(checkpoint)
    for _ in range(STEPS - 1):
        backend_step(alone, micro_batches(checkpoint, alone, 100), denominator(checkpoint))
    alone.save(out / "alone").result()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(r, port, checkpoint, out)) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return out, [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.distributed
def test_two_ranks_with_uneven_shares_take_the_same_steps(oracle, two_ranks):
    for norms, weights, *_ in two_ranks[1]:
        assert norms == pytest.approx(oracle[0], rel=1e-5)
        assert largest_difference(weights, oracle[1]) < 5e-6


@pytest.mark.distributed
def test_a_restart_goes_on_exactly(two_ranks):
    for _, weights, again, _ in two_ranks[1]:
        assert largest_difference(again, weights) == 0


@pytest.mark.distributed
def test_one_rank_goes_on_from_two_and_two_from_one(checkpoint, two_ranks):
    out, results = two_ranks
    alone = build(checkpoint)
    alone.load(out / "state")
    backend_step(alone, micro_batches(checkpoint, alone, 100), denominator(checkpoint))
    found = given_out(alone)
    assert largest_difference(found, results[0][1]) < 5e-6
    for _, weights, _, from_one in results:
        assert largest_difference(from_one, weights) < 5e-6


def test_it_saves_what_the_plain_trainer_holds_and_goes_on_from_it(checkpoint, oracle, tmp_path):
    backend = build(checkpoint)
    step = (micro_batches(checkpoint, backend, 100), denominator(checkpoint))
    for _ in range(STEPS - 1):
        backend_step(backend, *step)
    backend.save(tmp_path / "own").result()
    assert_saved_form(tmp_path / "own", oracle.before_last)
    resumed = build(checkpoint)
    resumed.load(save_form(oracle.before_last, tmp_path / "plain"))
    backend_step(resumed, *step)
    assert largest_difference(given_out(resumed), oracle.weights) < 5e-6


def test_frozen_routers_are_named_and_can_be_left_out(checkpoint):
    frozen = FSDP2Backend(
        checkpoint,
        MODEL,
        OPTIMIZER.model_copy(update={"freeze_router": True}),
        TrainerConfig(),
        STEPS,
    )
    gates = {f"model.language_model.layers.{n}.mlp.gate.weight" for n in (0, 1)}
    assert frozen.frozen == gates
    everything, less = (given_out(frozen, out) for out in (frozenset(), frozen.frozen))
    assert everything.keys() - less.keys() == gates
    assert build(checkpoint).frozen == frozenset()


def test_bfloat16_computes_near_float32_over_float32_weights(checkpoint):
    rows = trajectories(checkpoint, IMAGES)
    batch = collate(rows)
    half = MODEL.model_copy(update={"dtype": "bfloat16"})
    backend = FSDP2Backend(checkpoint, half, OPTIMIZER, TrainerConfig(), STEPS)
    assert {parameter.dtype for parameter in backend.root.parameters()} == {torch.float32}
    assert {weight.dtype for weight in given_out(backend).values()} == {torch.bfloat16}
    found, expected = backend_logprobs(backend, batch), backend_logprobs(build(checkpoint), batch)
    difference = (found - expected).abs()
    assert 1e-4 < float(difference.mean()) < 0.1


def test_bfloat16_adds_up_steps_that_bfloat16_weights_would_lose(checkpoint):
    """At a learning rate of 1e-6 no weight of 0.1 would change in bfloat16, whose next number is 5e-4 away."""
    optimizer = OPTIMIZER.model_copy(update={"lr": 1e-6, "weight_decay": 0.0})
    rows = trajectories(checkpoint, IMAGES)

    def moved(dtype: str) -> torch.Tensor:
        model = MODEL.model_copy(update={"dtype": dtype})
        backend = FSDP2Backend(checkpoint, model, optimizer, TrainerConfig(), STEPS)
        before = flat(backend)
        backend_training(backend, [(rows, advantages(rows))], denominator(checkpoint))
        return flat(backend) - before

    def flat(backend: FSDP2Backend) -> torch.Tensor:
        parameters = (getattr(p, "full_tensor", lambda p=p: p)() for p in backend.root.parameters())
        return torch.cat([p.detach().flatten().clone() for p in parameters])

    exact, half = moved("float32"), moved("bfloat16")
    assert exact.dtype == half.dtype == torch.float32
    assert torch.cosine_similarity(exact, half, dim=0) > 0.95
    assert 0.9 < half.norm() / exact.norm() < 1.1


def test_a_layout_key_it_does_not_know_is_refused(checkpoint):
    with pytest.raises(ValueError, match="tensor_parallel"):
        build(checkpoint, layout={"tensor_parallel": 2})
