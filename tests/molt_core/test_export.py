"""A checkpoint becomes a Hugging Face folder with the trained weights, which transformers and vLLM read alike."""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from molt_core.config import CheckpointConfig, EngineConfig, ModelConfig, TrainerConfig
from molt_core.export import main
from molt_core.models.load import (
    content_hash,
    eos_token_id,
    excluded_token_ids,
    iterate_weights,
    load_policy,
)
from molt_core.train.checkpoint import MARKER, CheckpointStore
from molt_core.train.fsdp2 import FSDP2Backend
from tests.harness.trainer_cases import (
    MODEL,
    OPTIMIZER,
    STEPS,
    advantages,
    backend_step,
    given_out,
    largest_difference,
    rescaled_checkpoint,
    trajectories,
)

PROMPT, NEW = [5, 17, 42, 99, 3], 12


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """(checkpoint, its export, the trainer's weights) after one step."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    policy = rescaled_checkpoint(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    backend = FSDP2Backend(policy, MODEL, OPTIMIZER, TrainerConfig(), STEPS)
    rows = trajectories(policy, (1, 0))
    step = ([(rows, advantages(rows))], sum(row.action_tokens for row in rows))
    backend_step(backend, *step)
    weights = given_out(backend)
    store = CheckpointStore(folder / "run" / "checkpoints", CheckpointConfig())
    draft = store.draft(1)
    backend.save(draft / "trainer").result()
    saved = store.commit(draft, b"", {"step": 1}, policy)
    dist.destroy_process_group()
    assert main([str(saved.path), str(folder / "out")]) == 0
    return saved.path, folder / "out", weights


def test_transformers_loads_the_trained_weights(exported):
    _, out, weights = exported
    loaded = dict(load_policy(out).named_parameters())
    assert largest_difference(loaded, weights) == 0


def test_experts_lie_as_in_the_published_layout(exported):
    """Hidden size 64, experts of 48: [E, H, 2I] on disk, [E, 2I, H] in memory."""
    _, out, weights = exported
    on_disk = dict(iterate_weights(out))
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(on_disk[name], weights[name].transpose(1, 2))


def _sample(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    from molt_core.rollout.engine import Engine, prepare_environment

    prepare_environment(EngineConfig())

    async def play():
        model = ModelConfig(path=str(folder), max_length=len(PROMPT) + NEW)
        excluded, eos = excluded_token_ids(folder), eos_token_id(folder)
        engine = Engine(folder, model, EngineConfig(), excluded, eos)
        await engine.start()
        found = await engine.generate(
            PROMPT, (), temperature=1.0, max_new_tokens=NEW, seed=1, stop_at_eos=False
        )
        engine.shutdown()
        return found.token_ids, found.logprobs

    return asyncio.run(play())


@pytest.mark.engine
def test_vllm_samples_from_the_distribution_that_transformers_computes(exported):
    _, out, _ = exported
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ids, logprobs = pool.submit(_sample, out).result()
    tokens = torch.tensor([PROMPT + ids.tolist()])
    with torch.no_grad():
        logits = load_policy(out)(input_ids=tokens).logits[0, len(PROMPT) - 1 : -1]
    logits[:, list(excluded_token_ids(out))] = -torch.inf
    expected = logits.log_softmax(-1).gather(1, tokens[0, len(PROMPT) :, None])[:, 0]
    assert float(expected.std()) > 0.1
    np.testing.assert_allclose(logprobs, expected.numpy(), rtol=0, atol=1e-5)


def test_the_policy_may_have_moved(exported, tmp_path, capsys):
    checkpoint, out, _ = exported
    facts = (checkpoint / MARKER).read_text()
    moved = tmp_path / "step-00000001"
    (checkpoint.parent / "step-00000001").rename(moved)
    try:
        assert main([str(moved), str(tmp_path / "out")]) == 2
        assert "say --policy FOLDER" in capsys.readouterr().err
        assert main([str(moved), str(tmp_path / "out"), "--policy", str(out)]) == 0
        assert content_hash(tmp_path / "out") == content_hash(out)
    finally:
        moved.rename(checkpoint)
    assert (checkpoint / MARKER).read_text() == facts


def test_what_is_there_already_is_not_overwritten(exported, capsys):
    checkpoint, out, _ = exported
    assert main([str(checkpoint), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
