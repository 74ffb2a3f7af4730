"""An identity changes with what determines the result, and with nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.expand import expand
from harness.identity import (
    ROOT,
    canonical,
    changed_snapshot,
    code_files,
    digest,
    hash_path,
    remove_snapshot,
    run_identity,
    take_snapshot,
)
from harness.spec import load
from tests.harness.test_spec import write


def identities(folder, old="", new="", scale="here") -> dict[tuple[str, int], str]:
    expansion = expand(
        load(write(folder, old, new)), scale, folder / "runs", base=folder, write=False
    )
    return {(run.system, run.seed): run.identity for run in expansion.runs}


def test_digest_is_sha256_of_canonical_json():
    # printf '{"a":[1,2.5],"b":null}' | sha256sum
    value = {"b": None, "a": [1, 2.5]}
    assert canonical(value) == '{"a":[1,2.5],"b":null}'
    assert digest(value) == "f66b2c50ccae61e3f2445d2439f42efc245581b18ed184ce5d3c22fb58eed9c4"


WHOLE = {
    "kind": "train",
    "scale": {"name": "tiny", "nodes": 1},
    "protocol": {"optimizer": {"lr": 0.1}},
    "system": {"name": "ours"},
    "seed": 0,
    "code": "aa",
    "files": {"rows.jsonl": "bb"},
    "image": None,
    "parents": ("cc",),
}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("kind", "warmup"),
        ("scale", {"name": "tiny", "nodes": 2}),
        ("protocol", {"optimizer": {"lr": 0.2}}),
        ("system", {"name": "theirs"}),
        ("seed", 1),
        ("code", "ab"),
        ("files", {"rows.jsonl": "bc"}),
        ("image", "sha256:dd"),
        ("parents", ("cd",)),
    ],
)
def test_every_part_counts(part, value):
    assert run_identity(**WHOLE) != run_identity(**{**WHOLE, part: value})


def test_the_same_file_gives_the_same_identities(tmp_path):
    assert identities(tmp_path) == identities(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("eps: 1e-6", "eps: 1e-7"),
        ("{shapes: 2}", "{shapes: 3}"),
        ("{time_limit: 00:30:00}", "{cpus_per_node: 4}"),
    ],
)
def test_protocol_and_shape_of_the_machine_change_every_run(tmp_path, old, new):
    before, after = identities(tmp_path), identities(tmp_path, old, new)
    assert all(before[run] != after[run] for run in before if run[0] in ("ours", "theirs"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Is one as good as the other?", "Which is better?"),
        ("margin: 0.05", "margin: 0.04"),
        ("{time_limit: 00:30:00}", "{time_limit: 01:30:00, hang_after_s: 60}"),
        ("seeds: [0, 1]", "seeds: [1, 0]"),
        ("lr: 1e-5", "lr: 1e-4"),  # another scale's
    ],
)
def test_what_cannot_change_a_result_does_not_change_its_identity(tmp_path, old, new):
    assert identities(tmp_path) == identities(tmp_path, old, new)


def test_an_arms_trainer_changes_its_own_runs_only(tmp_path):
    before, after = identities(tmp_path), identities(tmp_path, "world_size: 2", "world_size: 3")
    changed = {run for run in before if before[run] != after[run]}
    assert changed == {("theirs", 0), ("theirs", 1), ("conformance", 0)}


def test_the_warm_up_is_remade_for_its_recipe_and_not_for_the_rest(tmp_path):
    before = identities(tmp_path)[("warmup", 0)]
    assert identities(tmp_path, "eps: 1e-6", "eps: 1e-7")[("warmup", 0)] == before
    assert identities(tmp_path, "{steps: 3}", "{steps: 4}")[("warmup", 0)] != before
    frozen = identities(tmp_path, "eps: 1e-6", "eps: 1e-6\n    freeze_router: true")
    assert frozen[("warmup", 0)] != before


def test_another_recipe_of_the_warm_up_changes_every_run(tmp_path):
    before, after = identities(tmp_path), identities(tmp_path, "{steps: 3}", "{steps: 4}")
    assert all(before[run] != after[run] for run in before)


def test_a_folder_hashes_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    before = hash_path(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert hash_path(tmp_path) != before


def test_a_large_file_counts_by_size_head_and_tail(tmp_path):
    path = tmp_path / "weights"
    mebibyte = 1 << 20
    path.write_bytes(bytes(4 * mebibyte))
    before = hash_path(path, whole_up_to=mebibyte)
    for position, changes in ((0, True), (2 * mebibyte, False), (4 * mebibyte - 1, True)):
        data = bytearray(4 * mebibyte)
        data[position] = 1
        path.write_bytes(data)
        assert (hash_path(path, whole_up_to=mebibyte) != before) is changes
    path.write_bytes(bytes(4 * mebibyte + 1))
    assert hash_path(path, whole_up_to=mebibyte) != before


def test_code_is_what_a_run_can_import():
    names = {str(name) for name in code_files()}
    assert {"molt_core/config.py", "harness/baselines/megatron_core.py"} <= names
    assert not {name for name in names if name.startswith(("analysis", "tests", "experiments"))}
    assert not names & {"harness/submit.py", "harness/status.py", "harness/sync.py"}


@pytest.fixture
def project(tmp_path):
    """A project in git with one tracked file of code."""
    root = tmp_path / "project"
    (root / "molt_core").mkdir(parents=True)
    (root / "molt_core" / "a.py").write_text("A = 1\n")
    (root / ".gitignore").write_text("*.pyc\n")
    subprocess.run(["git", "init", "-q", root], check=True)
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    return root


def test_the_snapshot_has_the_working_tree_as_it_is(project, tmp_path):
    (project / "molt_core" / "a.py").write_text("A = 2\n")
    (project / "molt_core" / "new.py").write_text("B = 1\n")
    (project / "molt_core" / "a.pyc").write_text("")
    snapshot = take_snapshot(tmp_path / "store", project)
    files = {p.name: p.read_text() for p in (snapshot.path / "molt_core").iterdir()}
    assert files == {"a.py": "A = 2\n", "new.py": "B = 1\n"}


def test_later_edits_make_another_snapshot(project, tmp_path):
    first = take_snapshot(tmp_path / "store", project)
    (project / "molt_core" / "a.py").write_text("A = 3\n")
    second = take_snapshot(tmp_path / "store", project)
    assert first.hash != second.hash
    assert (first.path / "molt_core" / "a.py").read_text() == "A = 1\n"


def test_the_same_code_is_copied_once(project, tmp_path):
    first = take_snapshot(tmp_path / "store", project)
    when = first.path.stat().st_mtime_ns
    assert take_snapshot(tmp_path / "store", project) == first
    assert first.path.stat().st_mtime_ns == when
    assert len(list((tmp_path / "store").iterdir())) == 1


def test_a_snapshot_is_read_only_to_its_folders_and_can_be_removed(project, tmp_path):
    snapshot = take_snapshot(tmp_path / "store", project)
    every = [snapshot.path, *snapshot.path.rglob("*")]
    assert [path for path in every if path.stat().st_mode & 0o222] == []
    remove_snapshot(snapshot.path)
    assert list((tmp_path / "store").iterdir()) == []


def test_an_edit_a_new_file_and_a_missing_one_make_a_snapshot_another(project, tmp_path):
    snapshot = take_snapshot(tmp_path / "store", project)
    file = snapshot.path / "molt_core" / "a.py"
    (file.parent / "__pycache__").mkdir()  # as Python does where it may
    (file.parent / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"")
    assert changed_snapshot(snapshot.path, snapshot.hash) == ""
    file.write_text("A = 7\n")
    said = changed_snapshot(snapshot.path, snapshot.hash)
    assert f"in {snapshot.path} was changed after the submit" in said
    file.write_text("A = 1\n")
    (file.parent / "b.py").write_text("")
    assert changed_snapshot(snapshot.path, snapshot.hash)
    (file.parent / "b.py").unlink()
    assert changed_snapshot(snapshot.path, snapshot.hash) == ""
    file.unlink()
    assert changed_snapshot(snapshot.path, snapshot.hash)


def test_whoever_imports_other_code_than_the_runs_ends_at_the_import():
    """Also a process that nothing of ours was started in: Ray and vLLM start theirs by themselves."""
    stray = {"PYTHONPATH": str(ROOT), "MOLT_CODE": "/elsewhere"}
    command = [sys.executable, "-c", "import molt_core; print('imported')"]
    done = subprocess.run(command, env=stray, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""
    assert "and this run's code is /elsewhere" in done.stderr


def test_without_git_the_same_files_are_found(project, tmp_path):
    with_git = take_snapshot(tmp_path / "store", project)
    (project / ".git").rename(tmp_path / "elsewhere")
    assert take_snapshot(tmp_path / "store", project) == with_git


def test_the_project_is_where_the_packages_are():
    assert (ROOT / "molt_core" / "config.py").is_file()
