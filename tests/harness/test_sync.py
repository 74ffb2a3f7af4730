"""MLflow shows what the folders hold, however often one syncs and whatever happened in between."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
from mlflow import MlflowClient

from harness.processes import own_environment
from harness.queue import Queue, ask
from harness.run_folder import RunFolder, hold, is_held, write_json
from harness.run_status import queue_lock
from harness.tracking import Tracker, key_of, new_records, points
from tests.harness.conftest import TRAIN
from tests.harness.test_job import until

pytestmark = pytest.mark.usefixtures("own_cores")


def record(folder: RunFolder, step: int, attempt: int = 1, **fields) -> None:
    line = {"step": step, "attempt": attempt, "time_unix": 1000.0 + step + 500 * attempt, **fields}
    with open(folder.metrics, "a") as file:
        file.write(json.dumps(line) + "\n")


def child(store: str, folder: RunFolder):
    """The MLflow run of a run folder."""
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name(folder.path.parents[1].name)
    identity = folder.run["identity"]
    found = client.search_runs([experiment.experiment_id], f"tags.identity = '{identity}'")
    assert len(found) == 1
    return found[0]


def history(store: str, folder: RunFolder, key: str) -> list[tuple[int, float]]:
    points = MlflowClient(store).get_metric_history(child(store, folder).info.run_id, key)
    return [(point.step, point.value) for point in points]


def test_one_parent_and_a_child_with_what_it_is(store, planned):
    folder = planned()
    Tracker(folder.path.parent, store).sync()
    run = child(store, folder)
    assert run.data.tags["system"] == "molt"
    assert run.data.tags["seed"] == "0"
    assert run.data.tags["role"] == "candidate"
    assert run.data.params == {"loop.steps": "3"}
    assert run.info.status == "SCHEDULED"
    parent = MlflowClient(store).get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.data.tags["mlflow.runName"] == "tiny"


def test_syncing_again_adds_what_is_new_and_nothing_twice(store, planned):
    folder = planned()
    record(folder, 1, reward_mean=0.25)
    assert Tracker(folder.path.parent, store).sync() == 1
    assert Tracker(folder.path.parent, store).sync() == 0
    record(folder, 2, reward_mean=0.5)
    assert Tracker(folder.path.parent, store).sync() == 1
    assert history(store, folder, "reward_mean") == [(1, 0.25), (2, 0.5)]


def test_a_lost_memory_of_the_sync_costs_nothing(store, planned):
    folder = planned()
    record(folder, 1, reward_mean=0.25)
    Tracker(folder.path.parent, store).sync()
    (folder.path.parent / "mlflow.json").unlink()
    Tracker(folder.path.parent, store).sync()
    assert history(store, folder, "reward_mean") == [(1, 0.25)]


def test_a_lost_database_is_made_again(planned, tmp_path):
    folder = planned()
    record(folder, 1, reward_mean=0.25)
    command = [sys.executable, "-m", "harness.sync", "--runs", str(folder.path.parents[2])]
    uri = f"sqlite:///{tmp_path}/own.db"
    for _ in range(2):
        done = subprocess.run([*command, "--tracking-uri", uri], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "1 new records" in done.stdout
        assert history(uri, folder, "reward_mean") == [(1, 0.25)]
        (tmp_path / "own.db").unlink()


def test_what_nobody_can_tell_leaves_mlflow_as_it_is(store, planned, monkeypatch):
    folder = planned()
    with hold(folder.lock):
        Tracker(folder.path.parent, store).sync()
    assert child(store, folder).info.status == "RUNNING"
    write_json(folder.path.parent / "slurm.json", {folder.name: "7"})
    monkeypatch.setenv("PATH", "/nowhere")  # no squeue
    Tracker(folder.path.parent, store).sync()
    assert child(store, folder).info.status == "RUNNING"


def test_an_unfinished_line_waits_for_its_end(store, planned):
    folder = planned()
    record(folder, 1, reward_mean=0.25)
    with open(folder.metrics, "a") as file:
        file.write('{"step": 2, "attempt": 1, "time_un')
    assert Tracker(folder.path.parent, store).sync() == 1
    with open(folder.metrics, "a") as file:
        file.write('ix": 1502.0, "reward_mean": 0.5}\n')
    assert Tracker(folder.path.parent, store).sync() == 1
    assert history(store, folder, "reward_mean") == [(1, 0.25), (2, 0.5)]


def test_of_two_attempts_at_a_step_the_later_counts(store, planned):
    folder = planned()
    for attempt, reward in ((1, 0.1), (2, 0.9)):
        record(folder, 1, attempt, reward_mean=reward)
    Tracker(folder.path.parent, store).sync()
    assert history(store, folder, "reward_mean") == [(1, 0.9)]


def test_a_step_that_was_already_written_takes_the_later_attempts_value(store, planned):
    folder = planned()
    record(folder, 1, 1, reward_mean=0.1)
    Tracker(folder.path.parent, store).sync()
    record(folder, 1, 2, reward_mean=0.9)
    Tracker(folder.path.parent, store).sync()
    assert child(store, folder).data.metrics["reward_mean"] == 0.9


def test_only_finite_numbers_under_legal_names(store, planned):
    folder = planned()
    folder.metrics.write_text(
        '{"step": 1, "attempt": 1, "time_unix": 1.0, "pass@1": 0.5, "acc[0]": 1, "loss": Infinity, "kl": NaN,'
        ' "ok": true, "phase": "train", "tokens_dropped": {"stale": 3, "zero variance": 4}}\n'
    )
    Tracker(folder.path.parent, store).sync()
    assert child(store, folder).data.metrics == {
        "pass_at_1": 0.5,
        "acc_0_": 1.0,
        "tokens_dropped/stale": 3.0,
        "tokens_dropped/zero variance": 4.0,
    }


def test_more_points_than_a_batch_may_hold(store, planned):
    folder = planned()
    for step in range(1, 61):
        record(folder, step, **{f"m{n}": float(n) for n in range(20)})
    assert Tracker(folder.path.parent, store).sync() == 60
    assert len(history(store, folder, "m19")) == 60


@pytest.mark.parametrize(
    ("state", "status"),
    [("FAILED", "FAILED"), ("KILLED", "KILLED"), ("DIVERGED", "FAILED"), ("HANG", "FAILED")],
)
def test_the_status_says_how_it_ended_and_why(store, planned, state, status):
    folder = planned()
    end = {"state": state, "reason": f"{state}: because", "duration_s": 1.0}
    write_json(folder.path / "attempts" / "01" / "end.json", end)
    Tracker(folder.path.parent, store).sync()
    run = child(store, folder)
    assert (run.info.status, run.data.tags["status_reason"]) == (status, "because")
    assert run.data.tags["attempt"] == "1"


def test_only_done_json_is_finished_and_brings_the_final_numbers(store, planned):
    folder = planned()
    record(folder, 3, reward_mean=0.5)
    Tracker(folder.path.parent, store).sync()
    assert child(store, folder).info.status == "SCHEDULED"
    write_json(
        folder.path / "done.json",
        {"attempt": 1, "finished": 2000.0, "steps": 3, "summary": {"eval_reward_mean": 0.75}},
    )
    Tracker(folder.path.parent, store).sync()
    run = child(store, folder)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["final/eval_reward_mean"] == 0.75


def test_a_killed_run_that_goes_on_is_the_same_mlflow_run(store, planned):
    folder = planned()
    write_json(
        folder.path / "attempts" / "01" / "end.json",
        {"state": "KILLED", "reason": "KILLED: by hand", "duration_s": 1.0},
    )
    Tracker(folder.path.parent, store).sync()
    before = child(store, folder)
    write_json(folder.path / "attempts" / "02" / "start.json", {"time": time.time()})
    with hold(folder.lock):
        Tracker(folder.path.parent, store).sync()
    after = child(store, folder)
    assert (before.info.status, after.info.status) == ("KILLED", "RUNNING")
    assert after.info.run_id == before.info.run_id
    assert (after.data.tags["attempt"], after.data.tags["status_reason"]) == ("2", "")


def test_the_report_is_an_artifact_of_the_parent(store, planned):
    folder = planned()
    report = folder.path.parent / "report"
    report.mkdir()
    (report / "report.html").write_text("<p>EQUIVALENT</p>")
    Tracker(folder.path.parent, store).sync()
    parent = child(store, folder).data.tags["mlflow.parentRunId"]
    listed = MlflowClient(store).list_artifacts(parent, "report")
    assert [artifact.path for artifact in listed] == ["report/report.html"]


def test_verdicts_are_tags_and_valid_values_final_metrics(store, planned):
    folder = planned()
    report = folder.path.parent / "report"
    report.mkdir()
    identities = {folder.name: {"system": "molt", "seed": 0, "identity": folder.run["identity"]}}
    write_json(folder.path.parent / "plan.json", {"identities": identities})
    endpoint = {"candidate": "molt", "values": {"molt": {"0": 0.75}}}
    endpoints = [
        {**endpoint, "name": "accuracy", "verdict": "INCONCLUSIVE", "headline": "INCONCLUSIVE (n)"},
        {**endpoint, "name": "speed", "verdict": "INVALID", "headline": "INVALID (waiting)"},
    ]
    write_json(report / "report.json", {"endpoints": endpoints})
    Tracker(folder.path.parent, store).sync()
    run = child(store, folder)
    assert run.data.metrics["final/accuracy"] == 0.75
    assert "final/speed" not in run.data.metrics
    parent = MlflowClient(store).get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.data.tags["verdict accuracy: molt"] == "INCONCLUSIVE (n)"
    assert parent.data.tags["verdict speed: molt"] == "INVALID (waiting)"


def test_the_queue_keeps_mlflow_current_until_the_end(store, planned):
    folder = planned(body=TRAIN)
    ask(folder.path.parent, [folder.name], [folder.name])
    queue = Queue(folder.path.parent, store)
    queue.work()
    assert not queue.sync_failed, (folder.path.parent / "sync.log").read_text()
    assert folder.done is not None, folder.end
    run = child(store, folder)
    assert run.info.status == "FINISHED"
    assert history(store, folder, "reward_mean") == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]
    parent = MlflowClient(store).get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.info.status == "FINISHED"


SLOW_TO_END = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), os._exit(1)))
beat("training", 1)
(run / "pid").write_text(str(os.getpid()))
time.sleep(600)
"""


def test_a_queue_killed_outright_leaves_no_run_running_in_mlflow(store, planned):
    folder = planned(body=SLOW_TO_END)
    ask(folder.path.parent, [folder.name], [folder.name])
    command = [sys.executable, "-m", "harness.queue", str(folder.path.parent)]
    queue = subprocess.Popen([*command, "--tracking-uri", store], env=own_environment())
    until((folder.path / "pid").exists)
    until(lambda: is_held(folder.path.parent / "sync.lock"), 60)
    until(lambda: child_status(store, folder) == "RUNNING", 60)
    queue.kill()
    queue.wait()
    until(lambda: not is_held(folder.path.parent / "sync.lock"), 60)
    assert child_status(store, folder) == "KILLED"


def child_status(store: str, folder: RunFolder) -> str | None:
    experiment = MlflowClient(store).get_experiment_by_name(folder.path.parents[1].name)
    if experiment is None:
        return None
    found = MlflowClient(store).search_runs([experiment.experiment_id], "tags.kind = 'train'")
    return found[0].info.status if found else None


def test_a_part_of_an_experiment_without_a_run_of_its_arms_has_a_parent(store, planned):
    folder = planned(kind="warmup")
    folder.update_run(role="warmup")
    assert Tracker(folder.path.parent, store).sync() == 0


def test_the_command_line_syncs_and_follows_every_experiment_to_the_end(store, planned):
    """The first still works when the second is looked at."""
    folder = planned()
    record(folder, 1, reward_mean=0.25)
    runs = folder.path.parents[2]
    other = runs / f"{folder.path.parents[1].name}_b" / "tiny" / folder.name
    shutil.copytree(folder.path.parents[1], other.parents[1])
    RunFolder(other).update_run(identity=f"{folder.run['identity']}-b")
    command = [
        sys.executable,
        "-m",
        "harness.sync",
        "--runs",
        str(runs),
        "--tracking-uri",
        store,
        "--follow",
        "--json",
    ]
    seen = []
    with hold(queue_lock(folder.path.parent)):
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        until(lambda: child_status(store, RunFolder(other)) is not None, 60)
        seen.append(follower.poll())
    told = json.loads(follower.communicate(timeout=60)[0])
    assert seen == [None] and follower.returncode == 0
    assert told["new_records"] == {f"{f.parents[1].name}/tiny": 1 for f in (folder.path, other)}


def test_a_second_sync_leaves_the_folder_to_the_first(planned, store):
    folder = planned()
    command = [sys.executable, "-m", "harness.sync", "--runs", str(folder.path.parents[2])]
    with hold(folder.path.parent / "sync.lock"):
        done = subprocess.run([*command, "--tracking-uri", store], capture_output=True, text=True)
    assert "another sync is at work" in done.stdout
    assert not (folder.path.parent / "mlflow.json").exists()


def test_records_are_read_from_where_the_last_read_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    records, offset = new_records(path, 0)
    assert [record["step"] for record in records] == [1, 2]
    assert offset == len('{"step": 1}\n{"step": 2}\n')
    assert new_records(path, offset) == ([], offset)


def test_a_points_step_and_time_are_the_records():
    (point,) = points({"step": 7, "time_unix": 2.5, "attempt": 1, "loss": 0.5})
    assert (point.key, point.value, point.step, point.timestamp) == ("loss", 0.5, 7, 2500)


def test_names_are_mapped_to_what_mlflow_allows():
    assert key_of("pass@1 [x]/ü") == "pass_at_1 _x_/_"


def test_the_parent_works_while_a_queue_does(store, planned):
    folder = planned()
    with hold(queue_lock(folder.path.parent)):
        Tracker(folder.path.parent, store).sync()
    parent = child(store, folder).data.tags["mlflow.parentRunId"]
    assert MlflowClient(store).get_run(parent).info.status == "RUNNING"
    Tracker(folder.path.parent, store).sync()
    assert MlflowClient(store).get_run(parent).info.status == "FAILED"
