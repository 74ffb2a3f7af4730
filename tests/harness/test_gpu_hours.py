"""Hours by hand."""

from __future__ import annotations

import json

import pytest

from harness.gpu_hours import costs, parse_allocations, split_steps
from harness.run_folder import write_json


def test_a_requeued_job_is_the_sum_of_its_records():
    text = (
        "7_0|1800|billing=8,cpu=32,gres/gpu=4,mem=1G,node=1\n7_0|3600|cpu=32,gres/gpu=4\n7_1|0|\n"
    )
    assert parse_allocations(text) == {"7_0": (5400.0, 4, 32), "7_1": (0.0, 0, 0)}


def test_a_step_that_was_done_again_stands_once(tmp_path):
    records = [(1, 1, 10.0), (2, 1, 20.0), (2, 2, 25.0), (3, 2, 30.0)]
    lines = [json.dumps({"step": s, "attempt": a, "wall_s": w}) for s, a, w in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert split_steps(tmp_path / "metrics.jsonl") == (65.0, 20.0)


def test_without_accounting_the_attempts_count(make_run):
    """Two attempts of half an hour on 2 nodes of 4 devices are 8 device hours."""
    folder = make_run(nodes=2, devices_per_node=4)
    for _ in range(2):
        write_json(folder.new_attempt() / "end.json", {"state": "KILLED", "duration_s": 1800.0})
    (row,) = costs(folder.path.parent)
    assert (row.total, row.unit, row.attempts, row.source) == (
        pytest.approx(8.0),
        "GPU h",
        2,
        "attempts",
    )


def test_every_job_that_worked_at_a_run_counts(make_run, monkeypatch):
    """A first job of an hour, a second of half of one, both on 2 GPUs, and a last attempt that no accounting knows: 1 h."""
    folder = make_run(devices_per_node=2)
    asked = []

    def sacct(*command):
        asked.append(command[-1])
        return "7_0|3600|gres/gpu=2\n9_0|1800|gres/gpu=2\n"

    monkeypatch.setattr("harness.gpu_hours.ask_slurm", sacct)
    for job in ("7_0", "9_0", "11_0"):
        array, task = job.split("_")
        start = {"slurm_array_job_id": array, "slurm_array_task_id": task}
        write_json(folder.new_attempt() / "start.json", start)
        write_json(folder.attempts[-1] / "end.json", {"state": "KILLED", "duration_s": 3600.0})
    (row,) = costs(folder.path.parent)
    assert asked == ["--jobs=7,9,11"]
    assert (row.total, row.source) == (pytest.approx(2.0 + 1.0 + 2.0), "sacct")


def test_a_run_at_work_has_cost_what_has_passed(make_run):
    """An hour since its start, of which half went into a step; no accounting."""
    folder = make_run(cpus_per_node=1)
    write_json(folder.new_attempt() / "start.json", {"time": 1000.0})
    write_json(folder.path / "heartbeat.json", {"time_unix": 4600.0})
    folder.metrics.write_text(json.dumps({"step": 1, "attempt": 1, "wall_s": 1800.0}) + "\n")
    (row,) = costs(folder.path.parent)
    assert (row.total, row.stands, row.rest) == pytest.approx((1.0, 0.5, 0.5))
