"""What may go, and that nothing goes unasked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness import clean
from harness.run_folder import hold, write_json
from molt_core.train.checkpoint import MARKER


def checkpoints(folder, *steps: int, torn: int | None = None):
    for step in steps:
        path = folder.path / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "shard").write_bytes(b"x" * 100)
        if step != torn:
            (path / MARKER).write_text("{}")


def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(clean.main)
    return app


def names(folder, keep: int = 1) -> list[str]:
    return [item.path.name[-2:] for item in clean.superfluous(folder, keep)]


def test_the_newest_whole_checkpoints_are_kept_and_a_torn_one_is_none(make_run):
    folder = make_run()
    checkpoints(folder, 10, 20, 30, 40, torn=40)
    assert names(folder, keep=2) == ["10", "40"]


def test_of_a_run_that_is_done_one_checkpoint_stays(make_run):
    folder = make_run()
    checkpoints(folder, 10, 20, 30)
    write_json(folder.path / "done.json", {"attempt": 1})
    assert names(folder, keep=3) == ["10", "20"]


def test_trajectories_of_earlier_attempts_go_and_the_newest_stay_to_be_looked_at(make_run):
    folder = make_run()
    for _ in range(2):
        (folder.new_attempt() / "diverged_batch.pkl").write_bytes(b"x" * 50)
    first, last = (path / "diverged_batch.pkl" for path in folder.attempts)
    assert [(item.path, item.size) for item in clean.superfluous(folder, 1)] == [(first, 50)]
    write_json(folder.path / "done.json", {"attempt": 2})
    assert [item.path for item in clean.superfluous(folder, 1)] == [first, last]


def test_a_copy_of_the_code_goes_that_no_run_and_no_waiting_job_names(make_run, tmp_path):
    first, second = make_run("molt-s0-0"), make_run("molt-s1-1")
    runs, scale = first.path.parents[2], first.path.parent
    store = runs / ".code"
    for name, folder in (("a" * 16, first), ("b" * 16, second)):
        folder.update_run(code_path=f"../../../.code/{name}")
    for name in "abcd":
        (store / (name * 16) / "harness").mkdir(parents=True)
        (store / (name * 16) / "harness").chmod(0o555)
    write_json(scale / "queue.json", {"order": [], "work": {}})
    write_json(scale / "slurm.json", {first.name: "7_0"})
    (scale / "slurm").mkdir()
    (scale / "slurm" / "7.sh").write_text(f"export PYTHONPATH={store / ('c' * 16)}\n")
    (store / ".draft-x").mkdir()
    assert [item.path.name for item in clean.unnamed_code(runs)] == [".draft-x"]  # they are new
    for copy in store.glob("[!.]*"):
        os.utime(copy, (0, 0))
    with hold(runs / "another" / "tiny" / "submit.lock"):  # a first submit, at its beginning
        assert list(clean.unnamed_code(runs)) == []
    assert [item.path.name for item in clean.unnamed_code(runs)] == ["d" * 16, ".draft-x"]
    with hold(scale / "queue.lock"):
        assert list(clean.unnamed_code(runs)) == []
    write_json(first.path / "done.json", {"attempt": 1})
    items = list(clean.unnamed_code(runs))
    assert [item.path.name for item in items] == ["c" * 16, "d" * 16, ".draft-x"]
    for item in items:
        item.remove()
    assert sorted(path.name for path in store.iterdir()) == ["a" * 16, "b" * 16]


@pytest.mark.parametrize("since", ["before", "while it asked"])
def test_a_run_at_work_is_left_alone(make_run, since):
    folder = make_run()
    checkpoints(folder, 10, 20)
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    items = list(clean.superfluous(folder, 1))
    with hold(folder.lock):
        if since == "before":
            told = CliRunner().invoke(command(), ["--runs", str(folder.path.parents[2]), "--yes"])
            assert told.output.strip() == "Nothing to remove."
        else:
            assert clean.remove([folder], items, 1, folder.path.parents[2]) == []
    assert names(folder) == ["10"]


def test_what_was_not_shown_stays(make_run):
    """A run that has worked in between has other checkpoints to spare."""
    folder = make_run()
    checkpoints(folder, 10, 20)
    items = list(clean.superfluous(folder, 1))
    checkpoints(folder, 30)
    gone = clean.remove([folder], items, 1, folder.path.parents[2])
    assert [item.path.name for item in gone] == ["step-00000010"] and names(folder) == ["20"]


def test_a_machine_says_yes_beforehand(make_run):
    folder = make_run()
    checkpoints(folder, 10, 20)
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    arguments = ["--runs", str(folder.path.parents[2]), "--json"]
    assert CliRunner().invoke(command(), arguments).exit_code == 2 and names(folder) == ["10"]
    told = json.loads(CliRunner().invoke(command(), [*arguments, "--dry-run"]).stdout)
    assert [Path(i["path"]).name for i in told["would_go"]] == ["step-00000010"]
    told = json.loads(CliRunner().invoke(command(), [*arguments, "--yes"]).stdout)
    assert len(told["removed"]) == 1 and names(folder) == []


def test_nothing_goes_without_a_yes(make_run):
    folder = make_run()
    checkpoints(folder, 10, 20)
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    app = command()
    arguments = ["--runs", str(folder.path.parents[2])]
    declined = CliRunner().invoke(app, arguments, input="n\n")
    assert declined.exit_code == clean.EXIT_DECLINED and names(folder) == ["10"]
    agreed = CliRunner().invoke(app, arguments, input="y\n")
    assert agreed.exit_code == 0 and names(folder) == []
    assert (folder.path / "checkpoints" / "step-00000020").is_dir()
