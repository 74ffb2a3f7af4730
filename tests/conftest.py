"""Settings and costly things that tests share: one Ray instance and one built-in policy a session."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that of two processes that share the files none works alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_resume.py")


@pytest.fixture(scope="session")
def ray_session():
    """Ray with places for the actors of a small run; ended with the tests."""
    import ray

    from molt_core.train.__main__ import start_ray

    start_ray(places=4)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """torch.distributed with this process alone, on one thread."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    file = tmp_path_factory.mktemp("rendezvous") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The built-in policy from its seed, untrained."""
    from molt_core.models.tiny import build_tiny_qwen3_vl_moe

    return build_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("models") / "tiny")
