"""Fixtures of the core's tests."""

import pytest

from molt_core.config import RunConfig


@pytest.fixture
def start(tiny_checkpoint):
    """Starts ranks of world size 1, one after the other, each with its own process group."""
    import torch  # here: most tests of this folder need no model, and its imports take seconds
    import torch.distributed as dist

    from molt_core.train.worker import TrainerRank
    from tests.harness.trainer_cases import free_port

    torch.set_num_threads(1)

    def start(critic: dict | None = None, **algorithm):
        if dist.is_initialized():
            dist.destroy_process_group()
        config = RunConfig.model_validate(
            {
                "model": {"builtin": "tiny-qwen3-vl-moe"},
                "task": {"source": "shapes"},
                "algorithm": algorithm,
                "critic": critic,
                "trainer": {"micro_batch_rows": 3},
                "loop": {"max_staleness": 0},
            }
        )
        rank = TrainerRank(0, config, tiny_checkpoint)
        rank.start("127.0.0.1", free_port())
        return rank

    yield start
    dist.destroy_process_group()
