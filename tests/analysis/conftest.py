"""Synthetic experiments shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analysis.synthetic import write_experiment


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five seeds an arm, everything as it should be. Read only."""
    return write_experiment(tmp_path_factory.mktemp("sound"))
