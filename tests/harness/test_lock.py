"""A lock file is an experiment that gives the same runs."""

from __future__ import annotations

import pytest

from harness import lock
from harness.expand import expand
from harness.identity import ROOT
from harness.spec import load
from tests.harness.test_spec import write

FILES = [
    f for f in sorted((ROOT / "experiments").rglob("*.yaml")) if "\nprotocol:" in f.read_text()
]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_every_scale_of_every_experiment_is_reproduced_by_its_lock(file, tmp_path):
    experiment = load(file)
    for name in experiment.scales:
        made = expand(experiment, name, tmp_path / "runs", base=ROOT, write=False)
        made.folder.mkdir(parents=True, exist_ok=True)
        path = lock.write(made, {"commit": "abc", "dirty": True})
        again = expand(load(path), name, tmp_path / "runs", base=ROOT, write=False)
        assert [run.identity for run in again.runs] == [run.identity for run in made.runs]
        assert again.plan().content() == made.plan().content()


def test_nothing_is_left_to_a_default(tmp_path):
    """clip_norm has a default and the file does not give it."""
    expansion = expand(load(write(tmp_path)), "there", tmp_path / "runs", base=tmp_path)
    data = lock.resolved(expansion)
    assert data["protocol"]["optimizer"]["clip_norm"] is not None
    assert data["protocol"]["optimizer"]["lr"] == 1e-5  # the scale's own value, merged
    assert list(data["scales"]) == ["there"]
