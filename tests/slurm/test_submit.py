"""Submitting to a real Slurm: everything runs once, in the order of needs, and nothing waits for what cannot come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import scheduler, standing
from harness.canary import with_canaries
from harness.run_folder import RunFolder
from harness.slurm import cancel_jobs, job_ids, live, refusal, refusals
from harness.submit import submit
from tests.slurm.conftest import LOCAL, send, settled, states, wait_until


def test_every_run_is_done_in_the_order_of_needs(light):
    expansion = light()
    send(expansion)
    assert set(settled(expansion).values()) == {"DONE"}
    folders = [RunFolder(expansion.folder / r.name) for r in expansion.runs]
    began = {
        f.name: json.loads((f.attempts[0] / "start.json").read_text())["time"] for f in folders
    }
    for folder in folders:
        for need in folder.needs:
            assert need.done["finished"] <= began[folder.name]


def test_submitting_again_leaves_jobs_and_what_is_done_alone(light):
    expansion = light(train="time.sleep(3)\n" + "for step in range(1, steps + 1): record(step)\n")
    ids = send(expansion)
    start, _ = submit(expansion, expansion.runs)
    assert not [name for name in start if name not in live(expansion.folder, fresh=True)]
    settled(expansion)
    assert submit(expansion, expansion.runs)[0] == []
    attempts = [RunFolder(expansion.folder / name).attempts for name in ids]
    assert [len(found) for found in attempts] == [1] * len(ids)


def test_what_needs_a_failed_run_is_cancelled_and_does_not_wait_for_ever(light, tmp_path):
    expansion = light()
    submit(expansion, expansion.runs)
    (tmp_path / "warmup.py").write_text("raise SystemExit(1)")
    send(expansion)
    found = settled(expansion)
    assert found.pop(expansion.warmup.name) == "FAILED"
    assert set(found.values()) == {"BLOCKED"}


def test_a_wrong_partition_is_said_before_anything_is_queued(light):
    expansion = light()
    (said,) = refusals(
        expansion.folder, expansion.runs, LOCAL.model_copy(update={"partition": "nowhere"})
    )
    assert "Invalid partition name specified" in said and "partition=nowhere" in said


@pytest.mark.parametrize("key", ["account", "qos"])
def test_a_wrong_account_or_quality_of_service_is_said_before_anything_is_queued(light, key):
    expansion = light()
    (said,) = refusals(expansion.folder, expansion.runs, LOCAL.model_copy(update={key: "nobody"}))
    assert "Invalid" in said and f"{key}=nobody" in said


def test_a_time_limit_over_the_partitions_is_said_though_slurm_would_let_it_wait(light):
    expansion = light()
    longer = LOCAL.model_copy(update={"sbatch": {"time": "5-0"}})
    (said,) = refusals(expansion.folder, expansion.runs, longer)
    assert "the time limit of 120 h is over the partition's: main allows 24 h" in said


def test_more_devices_than_a_node_has_are_refused(light):
    expansion = light(resources=", device: cuda, devices_per_node: 9")
    (said,) = refusals(expansion.folder, expansion.runs[:1], LOCAL)
    assert "configuration is not available" in said


def test_a_submit_inside_an_allocation_sends_a_job_of_its_own(light, monkeypatch):
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "7",
        "SLURM_CPUS_PER_TASK": "9",
    }.items():
        monkeypatch.setenv(name, value)
    expansion = light(seeds="[0]")
    send(expansion, only="warmup")
    assert settled(expansion)[expansion.warmup.name] == "DONE"


def test_slurm_caps_an_array_at_its_highest_index():
    """The rule that the chunks rely on: MaxArraySize 1001 takes index 1000 and not 1001."""
    script = "#!/bin/sh\n#SBATCH --array={}\ntrue\n"
    assert scheduler.configuration()["MaxArraySize"] == "1001"
    assert refusal(script.format("0-1000")) == ""
    assert "Invalid job array" in refusal(script.format("0-1001"))


def test_a_canary_that_fails_keeps_the_others_from_starting(light, tmp_path):
    """A stand-in that works for the replicates and not for what is short."""
    body = "sys.exit(1) if steps == 3 else None\nfor step in range(1, steps + 1): record(step)\n"
    expansion = with_canaries(light(train=body))
    send(expansion)
    found = settled(expansion)
    kinds = {r.name: r.kind for r in expansion.runs}
    assert {found[name] for name, kind in kinds.items() if kind == "canary"} == {"FAILED"}
    assert {found[name] for name, kind in kinds.items() if kind == "train"} == {"BLOCKED"}


def test_a_job_that_waited_works_with_what_was_submitted_and_not_with_later_edits(light, tmp_path):
    """What a job and its run imported: copies beside the runs, and nothing of the working tree."""
    body = """
import molt_core
(run / "imported").write_text(molt_core.__file__)
for step in range(1, steps + 1): record(step)
"""
    expansion = light(train=body, seeds="[0]")
    name = expansion.replicates[0].name
    send(expansion, only=name)
    assert settled(expansion)[name] == "DONE"
    code = (tmp_path / "runs" / ".code").resolve()
    imported = Path((expansion.folder / name / "imported").read_text())
    assert imported.is_relative_to(code)
    assert all(not file.stat().st_mode & 0o222 for file in code.rglob("*.py"))
    (script,) = (expansion.folder / "slurm").glob(f"{job_ids(expansion.folder)[name][:-2]}.sh")
    (line,) = [x for x in script.read_text().splitlines() if x.startswith("export PYTHONPATH=")]
    assert Path(line.removeprefix("export PYTHONPATH=").partition('"')[0]).is_relative_to(code)


def test_a_process_that_imported_other_code_ends_at_once(light):
    body = """
import subprocess
stray = {**os.environ, "MOLT_CODE": "/elsewhere"}
said = subprocess.run([sys.executable, "-c", "print('started')"], env=stray, capture_output=True, text=True)
(run / "said").write_text(said.stdout + said.stderr)
for step in range(1, steps + 1): record(step)
"""
    expansion = light(train=body, seeds="[0]")
    name = expansion.replicates[0].name
    send(expansion, only=name)
    assert settled(expansion)[name] == "DONE"
    said = (expansion.folder / name / "said").read_text()
    assert "and this run's code is /elsewhere" in said and "started" not in said


def test_what_is_cancelled_while_it_waits_is_killed_there_and_in_mlflow(light, mlflow_says):
    """One task of a held array, then all of it: Slurm keeps no record of the first, and one of the array of the others."""
    held = LOCAL.model_copy(update={"sbatch": {"hold": True}})
    expansion = light()
    names = [run.name for run in expansion.replicates]
    send(expansion, held)
    cancel_jobs(expansion.folder, names[1:2])
    wait_until(lambda: states(expansion)[names[1]] == "KILLED")
    assert states(expansion)[names[0]] == "WAITING"
    folder = RunFolder(expansion.folder / names[1])
    assert mlflow_says(folder) == "KILLED"
    cancel_jobs(expansion.folder, [run.name for run in expansion.runs])
    wait_until(lambda: set(states(expansion).values()) == {"KILLED"})


def test_a_job_that_ends_well_without_a_record_is_an_accident(light, monkeypatch):
    """A profile whose first line ends the script; its task counts as COMPLETED."""
    monkeypatch.setattr(standing, "RECORD_S", 2.0)
    expansion = light(seeds="[0]")
    send(expansion, LOCAL.model_copy(update={"setup": ("exit 0",)}), only="warmup")
    assert settled(expansion)[expansion.warmup.name] == "INFRA"
    start, leave = submit(expansion, expansion.select("warmup"))
    assert start == [] and "harness.retry goes on" in dict(leave)[expansion.warmup.name]
