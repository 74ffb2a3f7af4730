"""When and where runs worked: attempts that overlap get lanes of their own, killed ones end at their last record."""

from __future__ import annotations

import re
from dataclasses import replace

import pandas as pd
import pytest

from analysis.load import FINISHED, Attempt, RunRecord, load_experiment
from analysis.plots_runs import _end, _lanes, power_curves, timeline
from analysis.verdict import judge
from tests.analysis.synthetic import write_experiment


def record(times=()):
    frame = pd.DataFrame({"time_unix": list(times)}, index=pd.Index(range(len(times)), name="step"))
    return RunRecord("run", "molt", 0, "id", FINISHED, "", {}, frame)


def attempt(start, end, host="node-0", state="DONE"):
    return Attempt(1, host, start, end, state)


def test_attempts_that_overlap_on_a_node_get_lanes_and_others_share_one():
    bars = [
        (attempt(0, 10), record(), ""),
        (attempt(5, 8), record(), ""),
        (attempt(8, 12), record(), ""),
        (attempt(10, 20), record(), ""),
        (attempt(0, 99, "node-1"), record(), ""),
    ]
    lanes = {key: [bar[0].started for bar in lane] for key, lane in _lanes(bars).items()}
    assert lanes == {("node-0", 0): [0, 10], ("node-0", 1): [5, 8], ("node-1", 0): [0]}


@pytest.mark.parametrize(("times", "end"), [((3.0, 7.0), 7.0), ((), 2.0), ((1.0,), 2.0)])
def test_a_killed_attempt_ends_with_its_last_record_and_never_before_its_start(times, end):
    assert _end(attempt(2.0, None), record(times)) == end


def test_the_timeline_shows_every_node_every_arm_and_what_was_lost(tmp_path):
    folder = write_experiment(
        tmp_path, steps=20, lost={("molt", 0): "oom"}, repeats=1, hosts=lambda s, seed: f"gpu{seed}"
    )
    figure = timeline(load_experiment(folder))
    words = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
    assert {"gpu0", "gpu4", "molt", "megatron", "molt, noise floor"} <= set(words)
    assert "s0 ✗" in words and "control s0" in words and "again s0" in words


def test_runs_that_recorded_no_start_have_no_timeline(tmp_path):
    folder = write_experiment(tmp_path, seeds=(0,), steps=4)
    for path in folder.glob("*/attempts/*/start.json"):
        path.unlink()
    assert timeline(load_experiment(folder)) == ""


def test_power_curves_leave_out_what_is_invalid(tmp_path):
    results = judge(load_experiment(write_experiment(tmp_path, steps=20)))
    assert [title for title, _ in power_curves(results)] == [r.endpoint.name for r in results]
    nothing = replace(results[0], measurement=replace(results[0].measurement, comparison=None))
    assert power_curves([nothing]) == []
