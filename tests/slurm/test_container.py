"""Runs in containers, for real: the launch line of each runtime, through stand-ins that make the container with bubblewrap."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from harness.run_folder import RunFolder, read_json
from harness.slurm import job_ids
from tests.slurm.conftest import TOKEN, run, send, settled, wait_until
from tests.slurm.test_survive import STEPS, ends, steps_of

LOOK = """
def writable(place):
    try:
        open(place, "a").close()
    except OSError:
        return False
    return True
(run / "seen.json").write_text(json.dumps({
    "secret": os.path.exists(SECRET),
    "data": open(DATA).read(),
    "data_writable": writable(DATA),
    "home": os.environ["HOME"],
    "scratch_writable": writable(os.environ["TMPDIR"] + "/x"),
    "workdir": os.getcwd(),
    "mark": os.environ["MOLT_RUN"],
    "greeting": os.environ["GREETING"],
    "token": os.environ["LAB_TOKEN"][::-1],
}))
"""
"""What a run sees of the machine, from inside."""


def at_work(expansion, profile) -> RunFolder:
    """A run of the baseline's, which needs no conformance; its warm-up works in a container too."""
    name = next(r.name for r in expansion.replicates if r.system == "theirs")
    send(expansion, profile, only=name)
    folder = RunFolder(expansion.folder / name)
    wait_until(lambda: (folder.heartbeat or {}).get("step"), 60)
    return folder


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_run_in_a_container_sees_what_is_mounted_and_saves_when_slurm_says_so(
    boxed, tmp_path, runtime
):
    expansion, profile = boxed(runtime, LOOK + STEPS.replace("PACE", "0.7"))
    folder = at_work(expansion, profile)
    run("scancel", "--batch", "--signal=USR2", job_ids(expansion.folder)[folder.name])
    assert settled(expansion)[folder.name] == "DONE"
    assert [end["state"] for end in ends(folder)] == ["TIMEOUT", "DONE"]
    assert steps_of(folder) == [1, 2, 3, 4, 5]  # it was told inside, saved, and went on
    seen = json.loads((folder.path / "seen.json").read_text())
    assert not seen["secret"] and seen["data"] == "rows" and not seen["data_writable"]
    assert seen["scratch_writable"] and seen["home"] != str(Path.home())
    assert seen["workdir"] == str(folder.attempts[-1])
    assert (seen["mark"], seen["greeting"]) == (folder.mark, "two words")
    assert seen["token"] == TOKEN[::-1]
    files = [path for path in expansion.folder.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    start = read_json(folder.attempts[-1] / "start.json")
    sha256 = hashlib.sha256((tmp_path / "image").read_bytes()).hexdigest()
    assert start["fingerprints"]["image"] == folder.run["image"]["sha256"] == sha256
    assert "torch" in start["packages"] and folder.run["fingerprints"] == start["fingerprints"]


def test_a_hang_in_a_step_of_slurms_writes_its_stacks_and_leaves_no_process(boxed):
    """The step's processes are slurmstepd's and no descendants of the job."""
    body = """
def deadlock():
    import threading
    lock = threading.Lock()
    lock.acquire(); lock.acquire()
(run / "pid").write_text(str(os.getpid()))
record(1, wall_s=0.1); beat("training", 1)
deadlock()
"""
    expansion, profile = boxed("pyxis", body, resources=", hang_after_s: 5")
    folder = at_work(expansion, profile)
    assert settled(expansion)[folder.name] == "HANG"
    stacks = [file.read_text() for file in (folder.attempts[0] / "stacks").glob("*.txt")]
    assert any("in deadlock" in text for text in stacks), stacks
    assert not run(
        "sh", "-c", f"ps -eo args | grep '[p]ython {expansion.places.base}/train.py' || true"
    )
