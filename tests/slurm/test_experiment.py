"""The demo's experiment, shortened, through submitit and Slurm to its end: real engine, real trainers."""

from __future__ import annotations

import sys

import pytest
import yaml

from harness.identity import ROOT
from harness.run_folder import read_json, run_folders
from tests.slurm.conftest import run


@pytest.mark.engine
def test_a_matched_experiment_is_done_on_slurm(tmp_path):
    short = yaml.safe_load((ROOT / "experiments" / "moe_vl.yaml").read_text())
    short["seeds"] = [0]
    short.pop("noise_floor", None)  # runs beside the replicates
    short["protocol"]["warmup"]["steps"] = 3
    short["protocol"]["loop"]["steps"] = 2
    short["protocol"]["evaluation"]["every"] = 2
    # One run at a time fits a machine of two cores; what Slurm believes of its nodes is another matter.
    short["scales"]["tiny"]["resources"]["cpus_per_node"] = 16
    short["scales"] = {"tiny": short["scales"]["tiny"]}
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump(short))
    submit = [sys.executable, "-m", "harness.submit", file, "--cluster", "local", "--wait"]
    said = run(*submit, "--runs", tmp_path / "runs")
    folders = run_folders(tmp_path / "runs" / "moe_vl" / "tiny")
    assert [folder.name for folder in folders if folder.done is None] == [], said
    assert len(folders) == 4  # warm-up, conformance, two arms
    starts = [read_json(folder.attempts[0] / "start.json") for folder in folders]
    assert all(start["slurm_array_job_id"] for start in starts)
