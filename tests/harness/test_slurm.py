"""What Slurm is asked for. Slurm's commands are small scripts that write down how they were called."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.cancel import cancel
from harness.cluster import Cluster
from harness.expand import expand
from harness.lead import longest, whole_records
from harness.requeue import PROFILE, profile
from harness.run_folder import RunFolder, read_json, write_json
from harness.run_status import read_statuses
from harness.sbatch import arrays, parameters, script
from harness.scheduler import SlurmError, time_limit_s
from harness.slurm import endless, hopeless, live, refusal, refusals, submit_arrays, work_run
from harness.spec import load
from harness.submit import submit
from tests.harness.conftest import put_on_path
from tests.harness.test_spec import write


@pytest.fixture
def expansion(tmp_path):
    """The cluster scale: two nodes of four GPUs."""
    path = write(
        tmp_path,
        "  there:",
        "  there:\n    resources: {nodes: 2, device: cuda, devices_per_node: 4, cpus_per_node: 16, time_limit: 10:00:30}",
    )
    return expand(load(path), "there", tmp_path / "runs", base=tmp_path)


PLAIN = Cluster()


def sent(expansion, names, cluster) -> dict[str, str]:
    runs = [run for run in expansion.runs if run.name in names]
    return submit_arrays(expansion.folder, runs, cluster)


def directives(lab, number: int) -> dict[str, str]:
    lines = (lab / f"{number}.sh").read_text().splitlines()
    found = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
    return dict(line.partition("=")[::2] for line in found)


def test_runs_of_a_kind_are_one_array_in_their_order(expansion):
    grouped = arrays(expansion.runs, PLAIN)
    assert [[run.kind for run in array.runs] for array in grouped] == [
        ["warmup"],
        ["conformance"],
        ["train"] * 6,
    ]
    assert [run.name for run in grouped[2].runs] == list(expansion.plan().order)


def test_time_is_rounded_up_to_whole_minutes(expansion):
    assert parameters(arrays(expansion.runs, PLAIN)[0], PLAIN, "x", {}, Path("code"))["time"] == 601


def test_arrays_wait_for_what_they_need_and_die_with_it(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    ids = sent(expansion, start, PLAIN)
    warmup, conformance = (ids[run.name] for run in expansion.runs[:2])
    assert (warmup, conformance) == ("101_0", "102_0")
    assert "dependency" not in directives(lab, 101)
    assert directives(lab, 102)["dependency"] == "afterok:101_0"
    asked = directives(lab, 103)
    assert (
        asked["dependency"] == "afterok:101_0,afterany:102_0"
    )  # the baseline needs no conformance
    assert asked["kill-on-invalid-dep"] == "yes"
    assert asked["array"] == "0-5%6"
    assert [ids[run.name] for run in expansion.replicates] == [f"103_{n}" for n in range(6)]


def test_a_run_asks_for_its_nodes_and_devices_once(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start, PLAIN)
    asked = directives(lab, 103)
    shape = {
        key: asked[key] for key in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task")
    }
    assert shape == {
        "nodes": "2",
        "ntasks-per-node": "1",
        "gpus-per-node": "4",
        "cpus-per-task": "16",
    }
    assert "\nsrun" not in (lab / "103.sh").read_text()


def test_what_is_done_is_no_dependency(lab, expansion):
    submit(expansion, expansion.runs)
    warmup, conformance = expansion.runs[:2]
    for run in (warmup, conformance):
        write_json(expansion.folder / run.name / "done.json", {"attempt": 1})
    sent(expansion, [run.name for run in expansion.replicates], PLAIN)
    assert "dependency" not in directives(lab, 101)


def test_a_need_that_is_queued_from_before_is_waited_for(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start[:2], PLAIN)
    sent(expansion, start[2:], PLAIN)
    assert directives(lab, 103)["dependency"] == "afterok:101_0,afterany:102_0"


def test_a_need_that_nobody_works_keeps_a_run_from_being_sent(lab, expansion):
    submit(expansion, expansion.runs)
    runs = expansion.replicates
    found = hopeless(expansion.folder, runs, set())
    assert set(found) == {run.name for run in runs}


def test_queued_runs_are_waiting_and_the_others_planned(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start[:2], PLAIN)
    assert live(expansion.folder) == set(start[:2])
    states = {status.run: status.state for status in read_statuses(expansion.folder)}
    assert [states[name] for name in start] == ["WAITING"] * 2 + ["PLANNED"] * 6


def test_a_scheduler_that_does_not_answer_is_an_error_and_no_run_is_called_dead(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start, PLAIN)
    (lab / "down").touch()
    with pytest.raises(SlurmError, match="timed out"):
        live(expansion.folder, fresh=True)


def test_many_looks_are_one_question(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start, PLAIN)
    (lab / "squeue.calls").unlink()
    for _ in range(50):
        live(expansion.folder)
    assert (lab / "squeue.calls").read_text().count("\n") == 1


def test_an_allocation_around_the_submit_does_not_reach_the_job(lab, expansion, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/etc/elsewhere/slurm.conf")
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start[:1], PLAIN)
    seen = (lab / "101.env").read_text()
    assert "SLURM_JOB_ID" not in seen and "SLURM_CONF=/etc/elsewhere/slurm.conf" in seen


def test_a_refusing_sbatch_is_one_line_and_not_a_traceback(lab, expansion):
    (lab / "refuses").touch()
    start, _ = submit(expansion, expansion.runs)
    with pytest.raises(SlurmError, match="sbatch: .*invalid partition"):
        sent(expansion, start, PLAIN)


def test_more_runs_than_an_array_may_have_are_several_arrays_that_share_the_bound(lab, expansion):
    """MaxArraySize 4 allows the indices 0 to 3."""
    (lab / "size").write_text("4")
    start, _ = submit(expansion, expansion.runs)
    ids = sent(expansion, start, Cluster(max_running=3))
    assert directives(lab, 103)["array"] == "0-3%2"
    assert directives(lab, 104)["array"] == "0-1%1"
    expected = ["103_0", "103_1", "103_2", "103_3", "104_0", "104_1"]
    assert [ids[run.name] for run in expansion.replicates] == expected


def test_a_submission_that_arrived_in_spite_of_a_time_out_is_not_sent_again(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    (lab / "slow").touch()
    ids = sent(expansion, start[:1], PLAIN)
    assert ids == {start[0]: "101_0"}
    assert (lab / "sbatch.calls").read_text().count("\n") == 1


def test_a_submission_that_was_lost_with_a_time_out_is_sent_again(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    (lab / "slow").touch()
    (lab / "lost").touch()
    assert sent(expansion, start[:1], PLAIN) == {start[0]: "101_0"}
    assert (lab / "sbatch.calls").read_text().count("\n") == 2


def test_a_submit_that_was_killed_before_it_noted_the_id_finds_its_job(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    sent(expansion, start[:1], PLAIN)
    (expansion.folder / "slurm.json").unlink()
    assert sent(expansion, start[:1], PLAIN) == {start[0]: "101_0"}
    assert (lab / "sbatch.calls").read_text().count("\n") == 1


def test_a_profile_sets_and_removes_any_directive(expansion):
    sbatch = {"nodes": None, "reservation": "friday", "exclusive": None}
    profile = Cluster(partition="gpu", account="me", gpus="gres", gpu_type="h100", sbatch=sbatch)
    array = arrays(expansion.runs, profile)[0]
    lines = script(array, profile, "x", {}, Path("code"), expansion.folder).splitlines()
    found = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")}
    assert {"partition=gpu", "account=me", "gres=gpu:h100:4", "reservation=friday"} <= found
    assert not any(line.startswith(("nodes", "exclusive", "gpus")) for line in found)


def test_what_slurm_would_refuse_is_said_once_before_anything_is_queued(lab, expansion):
    (lab / "refuses").touch()
    (said,) = refusals(expansion.folder, expansion.runs, PLAIN)
    assert said.startswith("sbatch: error: invalid partition specified: nowhere")
    assert not expansion.folder.exists()


@pytest.mark.parametrize(
    ("directive", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("1:00:00", 3600),
        ("2-0", 172800),
        ("1-12", 129600),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(directive, seconds):
    """The six forms of sbatch(1)."""
    assert time_limit_s(directive) == seconds


def test_an_option_that_sbatch_does_not_know_is_named(tmp_path, monkeypatch):
    said = "sbatch: unrecognized option '--nonsense'"
    hint = 'Try "sbatch --help" for more information'
    put_on_path(
        tmp_path,
        monkeypatch,
        sbatch=f"#!/bin/sh\necho {shlex.quote(said)} >&2; echo '{hint}' >&2; exit 1",
    )
    assert refusal("#!/bin/sh\n") == said


def test_a_signal_that_comes_before_the_job_can_hear_it_waits(monkeypatch):
    """Blocked, as it stays over exec."""
    blocked = []

    def execve(*_):
        blocked.extend(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    monkeypatch.setattr("os.execve", execve)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        work_run("run", "profile")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert signal.SIGUSR2 in blocked and signal.SIGUSR2 not in before


def test_cancel_is_one_scancel(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    ids = sent(expansion, start, PLAIN)
    stopped, _ = cancel(expansion.folder, "ours")
    expected = [run.name for run in expansion.runs if "ours" in run.name]
    assert sorted(stopped) == sorted(expected)
    (call,) = (lab / "scancel.calls").read_text().splitlines()
    assert sorted(call.split()) == sorted(ids[name] for name in expected)


def test_ids_are_kept_beside_the_runs(lab, expansion):
    start, _ = submit(expansion, expansion.runs)
    ids = sent(expansion, start, PLAIN)
    assert read_json(expansion.folder / "slurm.json") == ids


def test_a_job_that_waits_keeps_the_profile_that_it_was_sent_with(lab, expansion, monkeypatch):
    from submitit.core.utils import DelayedSubmission

    start, _ = submit(expansion, expansion.runs)
    for run, partition in zip(start, ("first", "second")):
        sent(expansion, [run], Cluster(partition=partition))
    for number, partition in ((101, "first"), (102, "second")):
        call = DelayedSubmission.load(expansion.folder / "slurm" / f"{number}_0_submitted.pkl")
        monkeypatch.setenv(PROFILE, call.args[1])
        assert profile(expansion.folder).partition == partition
    monkeypatch.delenv(PROFILE)
    assert profile(expansion.folder).partition == "second"  # a retry's


def measured(folder: RunFolder, steps: Sequence[float] = (), saves: Sequence[float] = ()) -> None:
    """Leave in ``folder`` what a run of those times leaves."""
    file = folder.path / "checkpoints" / "saves.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f'{{"step": 1, "save_s": {took}, "bytes": 9}}\n' for took in saves))
    folder.metrics.write_text("".join(f'{{"step": 1, "wall_s": {took}}}\n' for took in steps))


def test_a_run_is_told_to_save_a_step_and_a_save_ahead_as_they_were_measured(lab, expansion):
    """Of runs on the same shape: a step of 300 s, a save of 45 s, 30 s to spare; the profile's own 120 s before that."""
    submit(expansion, expansion.runs)
    needs, names = expansion.runs[:2], [run.name for run in expansion.replicates]
    for run in needs:
        write_json(expansion.folder / run.name / "done.json", {"attempt": 1})
        measured(RunFolder(expansion.folder / run.name), steps=[9000.0], saves=[9000.0])  # one node
    train = RunFolder(expansion.folder / names[0])
    sent(expansion, names[:1], PLAIN)
    assert directives(lab, 101)["signal"] == "B:USR2@120"
    measured(train, steps=[20.0, 300.0, 30.0], saves=[45.0, 40.0])
    sent(expansion, names[1:2], PLAIN)
    assert directives(lab, 102)["signal"] == "B:USR2@375"
    said = (
        "# USR2 comes 375 s before the end: longest step 300.0 s, longest save 45.0 s, margin 30 s"
    )
    assert said in (lab / "102.sh").read_text()
    assert read_json(expansion.folder / "cluster.json")["warn_s"] == 120


def test_a_line_that_was_cut_is_passed_over(tmp_path):
    saves = tmp_path / "saves.jsonl"
    saves.write_text('{"save_s": 2.5}\n{"step": 4, "sa\n[1]\n{"save_s": 3.5}\n')
    assert [record["save_s"] for record in whole_records(saves)] == [2.5, 3.5]
    assert whole_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("asked", [refusal, endless])
def test_a_controller_that_does_not_answer_refuses_nothing(tmp_path, monkeypatch, asked):
    said = "echo 'x: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    put_on_path(tmp_path, monkeypatch, sbatch=f"#!/bin/sh\n{said}", scontrol=f"#!/bin/sh\n{said}")
    with pytest.raises(SlurmError, match="Unable to contact"):
        asked("#!/bin/sh\n#SBATCH --time=60\n")


@pytest.mark.parametrize(
    ("step_s", "save_s", "seconds"),
    [
        (0.0, 0.0, 120),
        (300.0, 0.0, 450),  # no save measured: the profile's time for it
        (20.0, 400.0, 830),  # the save in progress is finished first, and another made
        (20.0, 30.0, 120),
        (3000.0, 400.0, 1800),  # half of the limit
    ],
)
def test_the_lead_has_room_for_what_is_in_progress_and_for_a_save(step_s, save_s, seconds):
    assert longest(step_s, save_s, least_s=120, limit_s=3600).seconds == seconds
