"""A lock file is an experiment that gives the same runs."""

from __future__ import annotations

import functools

import pytest

from harness import expand as expand_module
from harness import lock
from harness.container import Image
from harness.expand import expand
from harness.identity import ROOT, take_snapshot
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


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """(expansion, its lock, a function that makes the project's code another one)."""
    project = tmp_path / "project"
    (project / "molt_core").mkdir(parents=True)
    (project / "molt_core" / "a.py").write_text("A = 1\n")
    made = functools.partial(take_snapshot, root=project)
    monkeypatch.setattr(expand_module, "take_snapshot", made)
    expansion = expand(load(write(tmp_path)), "here", tmp_path / "runs", base=tmp_path)
    expansion.folder.mkdir(parents=True)
    path = lock.write(expansion, {"commit": "abc"})
    return expansion, path, lambda: (project / "molt_core" / "a.py").write_text("A = 2\n")


def test_a_lock_on_other_code_gives_the_runs_it_was_made_from_out_of_the_codes_copy(
    locked, tmp_path
):
    made, path, edit = locked
    edit()
    again = expand(load(path), "here", tmp_path / "runs", base=tmp_path)
    assert [run.identity for run in again.runs] == [run.identity for run in made.runs]
    assert (again.snapshot.path / "molt_core" / "a.py").read_text() == "A = 1\n"
    other = expand(load(tmp_path / "small.yaml"), "here", tmp_path / "runs", base=tmp_path)
    assert other.runs[0].identity != made.runs[0].identity


def test_a_later_submit_of_something_else_leaves_an_earlier_lock(locked, tmp_path):
    made, path, _ = locked
    before = path.read_bytes()
    other = expand(
        load(write(tmp_path, "eps: 1e-6", "eps: 1e-7")), "here", tmp_path / "runs", base=tmp_path
    )
    assert lock.write(other, {"commit": "abc"}) != path and path.read_bytes() == before
    assert lock.write(made, {"commit": "abc"}) == path


def test_a_lock_on_other_code_without_a_copy_is_refused_with_code_and_commit(locked, tmp_path):
    made, path, edit = locked
    edit()
    with pytest.raises(ValueError, match=r"made_with\.code: it was made with the code") as error:
        expand(load(path), "here", tmp_path / "elsewhere", base=tmp_path)
    assert made.snapshot.hash[:16] in str(error.value) and "commit abc" in str(error.value)


def test_an_edited_lock_and_another_image_are_refused(locked, tmp_path):
    _, path, _ = locked
    with pytest.raises(ValueError, match=r"made_with\.runs: .*image None, here 11111"):
        image = Image("/images/a.sif", "1" * 64)
        expand(load(path), "here", tmp_path / "runs", base=tmp_path, image=image)
    path.write_text(path.read_text().replace("eps: 1.0e-06", "eps: 1.0e-07"))
    with pytest.raises(ValueError, match=r"made_with\.runs: these would be other runs"):
        expand(load(path), "here", tmp_path / "runs", base=tmp_path)
