"""Runs come from the file alone: once each, interleaved, with what they wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.expand import arms_difference, expand, flatten, interleaved
from harness.spec import load
from tests.harness.test_spec import GOOD, write


@pytest.fixture
def expansion(tmp_path):
    return expand(load(write(tmp_path)), "here", tmp_path / "runs", base=tmp_path, write=False)


def test_every_system_meets_every_seed_once(expansion):
    pairs = sorted((run.system, run.seed) for run in expansion.replicates)
    assert pairs == [("ours", 0), ("ours", 1), ("theirs", 0), ("theirs", 1)]


def test_arms_alternate_in_blocks_of_one_seed(tmp_path):
    experiment = load(write(tmp_path, "seeds: [0, 1]", f"seeds: {list(range(40))}"))
    order = list(interleaved(experiment, experiment.scales["here"]))
    blocks = [order[n : n + 2] for n in range(0, 80, 2)]
    assert all({system for system, _ in block} == {"ours", "theirs"} for block in blocks)
    assert [block[0][1] for block in blocks] == list(range(40))
    first = sum(block[0][0] == "ours" for block in blocks)
    assert 8 <= first <= 32  # random, and 1 - 2e-5 sure of a fair coin


def test_the_order_is_the_same_each_time(tmp_path):
    experiment = load(write(tmp_path))
    orders = [list(interleaved(experiment, experiment.scales["here"])) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2]


def test_a_candidate_waits_for_its_own_pairs_conformance_and_the_baseline_for_none(tmp_path):
    second = "  mine:\n    role: candidate\n    trainer: {micro_batch_rows: 2}\n  theirs:"
    expansion = expand(
        load(write(tmp_path, "  theirs:", second)), "here", tmp_path, base=tmp_path, write=False
    )
    warmup, ours, mine = expansion.runs[:3]
    assert [run.kind for run in (warmup, ours, mine)] == ["warmup", "conformance", "conformance"]
    assert (warmup.needs, ours.needs, mine.needs) == ((), (warmup.name,), (warmup.name,))
    expected = {
        "ours": (warmup.name, ours.name),
        "mine": (warmup.name, mine.name),
        "theirs": (warmup.name,),
    }
    assert {run.system: run.needs for run in expansion.replicates} == expected


def test_conformance_runs_both_arms_trainers(expansion):
    conformance = expansion.runs[1]
    assert conformance.config.trainer.world_size == 1
    assert conformance.against.trainer.world_size == 2


FLOOR = "noise_floor:\n  control: {seeds: [0, 7]}\n  repeats: {seed: 1, count: 2, systems: [ours]}\nseeds: [0, 1]"


def test_the_noise_floor_runs_after_the_replicates_and_enters_no_arm(tmp_path):
    experiment = load(write(tmp_path, "seeds: [0, 1]", FLOOR))
    expansion = expand(experiment, "here", tmp_path, base=tmp_path, write=False)
    floor = expansion.trained[4:]
    assert [(run.system, run.seed, run.purpose) for run in floor] == [
        ("theirs", 0, "control"),
        ("theirs", 7, "control"),
        ("ours", 1, "repeat"),
        ("ours", 1, "repeat"),
    ]
    assert len({run.identity for run in expansion.trained}) == 8
    purposes = [run.purpose for run in expansion.plan().identities.values()]
    assert purposes == ["replicate"] * 4 + ["control"] * 2 + ["repeat"] * 2


def test_only_the_control_has_learning_rate_zero_and_only_its_rate_differs(tmp_path):
    experiment = load(write(tmp_path, "seeds: [0, 1]", FLOOR))
    expansion = expand(experiment, "here", tmp_path, base=tmp_path, write=False)
    rates = {run.name: run.config.optimizer.lr for run in expansion.trained}
    assert {name.split("-")[0] for name, lr in rates.items() if lr == 0} == {"control"}
    replicate = next(r for r in expansion.replicates if (r.system, r.seed) == ("theirs", 0))
    control, ordinary = (
        flatten(r.config.model_dump(mode="json")) for r in (expansion.trained[4], replicate)
    )
    assert {key for key in control if control[key] != ordinary[key]} == {"optimizer.lr"}


SWITCH = """\
switch: engine.prefix_caching
systems:
  ours: {role: candidate, switch: true, trainer: {backend: fsdp2}}
  theirs: {role: baseline, switch: false, trainer: {backend: fsdp2}}
seeds:"""


@pytest.fixture
def switched(tmp_path):
    systems = GOOD[GOOD.index("systems:") : GOOD.index("seeds: [0, 1]") + len("seeds:")]
    return load(write(tmp_path, systems, SWITCH))


def test_a_switch_is_the_one_difference_of_the_arms_and_the_plan_declares_it(switched, tmp_path):
    assert arms_difference(switched.scales["here"]) == {
        "engine.prefix_caching": {"ours": True, "theirs": False}
    }
    expansion = expand(switched, "here", tmp_path, base=tmp_path, write=False)
    assert expansion.plan().switch == "engine.prefix_caching"
    assert len({run.identity for run in expansion.replicates}) == 4


def test_a_conformance_compares_trainers_under_one_protocol_whatever_the_switch(switched, tmp_path):
    expansion = expand(switched, "here", tmp_path, base=tmp_path, write=False)
    (conformance,) = (run for run in expansion.runs if run.kind == "conformance")
    assert conformance.against.engine == conformance.config.engine
    assert conformance.config.engine.prefix_caching is True


def test_no_run_is_chosen_without_what_it_needs(expansion):
    chosen = expansion.select("ours-s1")
    assert [run.kind for run in chosen] == ["warmup", "conformance", "train"]
    assert [run.kind for run in expansion.select("theirs-s1")] == ["warmup", "train"]
    with pytest.raises(ValueError, match="no run's name contains it"):
        expansion.select("nobody")


def test_the_plan_names_the_replicates_in_their_order(expansion):
    plan = expansion.plan()
    assert plan.order == tuple(run.name for run in expansion.replicates)
    assert plan.baseline == "theirs"
    assert plan.identities[plan.order[0]].identity == expansion.replicates[0].identity


def test_the_arms_differ_in_what_the_file_says(tmp_path):
    difference = arms_difference(load(write(tmp_path)).scales["here"])
    assert difference == {"trainer.world_size": {"ours": 1, "theirs": 2}}


def test_a_published_model_needs_no_warm_up():
    path = Path(__file__).resolve().parents[2] / "experiments" / "moe_vl.yaml"
    expansion = expand(load(path), "h100x16", Path("runs"), base=path.parent, write=False)
    assert expansion.warmup is None
    assert len(expansion.replicates) == 10


def test_nothing_is_written_where_nothing_shall_be(tmp_path, expansion):
    assert expansion.folder == tmp_path / "runs" / "small" / "here"
    assert not (tmp_path / "runs").exists()


def test_flatten_joins_keys_with_dots():
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2]}
