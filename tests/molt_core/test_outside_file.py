"""An estimator and a loss from one file outside the package, as molt_core/README.md shows them: what it says must run."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import molt_core
from molt_core.algo.registry import load_plugins
from tests.molt_core.test_worker import batch, rollouts_of, score_of, step


def python_blocks() -> list[str]:
    """The code that molt_core/README.md shows: what it says must run."""
    text = (Path(molt_core.__file__).parent / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def write(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    """The documented one, in one file: a name belongs to the file that registered it."""
    return write(tmp_path_factory.mktemp("plugin") / "mine.py", python_blocks()[0])


def test_an_estimator_and_a_loss_from_one_outside_file_train_a_policy(
    start, tiny_checkpoint, plugin
):
    rank = start(plugins=[plugin], advantage="median_baseline", loss="half_down", correction="off")
    found = batch(tiny_checkpoint)
    rollouts = rollouts_of(rank, found)
    # Rewards are 0 or 1 and groups have three rollouts: the median is the majority's reward.
    assert {float(a) for r in rollouts for a in r.advantages} <= {-1.0, 0.0, 1.0}
    down = sum(int((r.advantages < 0).sum()) for r in rollouts)
    before = score_of(rank, found)
    results = [step(rank, rollouts) for _ in range(5)]
    assert results[0].sums["pushed_down_fraction"] == down
    assert all(result.stepped for result in results)
    moved = score_of(rank, found) - before
    assert float((moved * np.concatenate([r.advantages for r in rollouts])).sum()) > 0.1


def test_the_documented_test_of_the_documented_estimator_passes(plugin, tmp_path):
    load_plugins([plugin])
    runpy.run_path(write(tmp_path / "test_mine.py", python_blocks()[1]))[
        "test_the_baseline_is_the_group_s_median"
    ]()
