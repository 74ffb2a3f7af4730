"""A short run of each arm, which the others wait for and the analysis does not see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.canary import with_canaries
from harness.expand import expand
from harness.run_folder import RunFolder
from harness.spec import load
from harness.submit import submit
from molt_core.config import RunConfig, load_run_config
from tests.harness.test_spec import write


@pytest.fixture
def expansion(tmp_path):
    return expand(load(write(tmp_path)), "here", tmp_path / "runs", base=tmp_path)


def test_each_arm_has_one_and_every_replicate_waits_for_all(expansion):
    found = with_canaries(expansion)
    canaries = {run.name for run in found.runs if run.kind == "canary"}
    assert {name.split("-")[1] for name in canaries} == {"ours", "theirs"}
    assert all(canaries <= set(run.needs) for run in found.replicates)


def test_replicates_stay_the_same_runs_and_the_plan_the_same_plan(expansion):
    found = with_canaries(expansion)
    assert [run.identity for run in found.replicates] == [r.identity for r in expansion.replicates]
    assert found.plan() == expansion.plan()


def test_it_is_short_evaluates_and_saves_and_its_configuration_is_a_valid_one(expansion):
    found = with_canaries(expansion)
    submit(found, found.runs)
    canary = next(run for run in found.runs if run.kind == "canary")
    folder = RunFolder(found.folder / canary.name)
    config = load_run_config(folder.path / "config.yaml")
    assert (config.loop.steps, config.evaluation.every) == (3, 3)
    assert [step for step in range(1, 4) if config.saves_after(step)] == [2]
    assert folder.run["command"][2] == "molt_core.train"


def test_it_fits_a_warm_up_that_is_longer_than_itself(expansion):
    (first, *_) = expansion.replicates
    config = first.config
    longer = {
        "optimizer": {**config.optimizer.model_dump(), "warmup_steps": 5, "schedule": "cosine"},
        "algorithm": {**config.algorithm.model_dump(), "advantage": "gae"},
        "critic": {"warmup_steps": 5, "placement": "separate"},
        "loop": {**config.loop.model_dump(), "steps": 20},
    }
    run = replace(first, config=RunConfig.model_validate({**config.model_dump(), **longer}))
    found = with_canaries(replace(expansion, runs=(run,))).runs[0].config
    assert (found.loop.steps, found.optimizer.warmup_steps, found.critic.warmup_steps) == (3, 2, 2)
