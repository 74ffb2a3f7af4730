"""The local cluster is a Slurm that the other tests can believe."""

from __future__ import annotations

from slurm.local import cluster
from tests.slurm.conftest import run, wait_until


def test_each_node_has_its_own_name():
    assert sorted(run("srun", "--nodes=2", "--nodelist=node[2-3]", "hostname").split()) == [
        "node2",
        "node3",
    ]


def test_a_job_sees_the_devices_that_it_asked_for_and_no_more():
    shown = run("srun", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert len(shown.split(",")) == 2


def test_accounting_remembers_how_a_job_ended():
    job = run("sbatch", "--parsable", "--output=/dev/null", "--wrap", "exit 3")
    asked = ["sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2"]
    ended = wait_until(
        lambda: "FAILED" in (said := run(*asked, "--format=State,ExitCode")) and said
    )
    assert ended == "FAILED|3:0"


def test_a_node_without_power_loses_its_jobs_and_comes_back():
    command = ["sbatch", "--parsable", "--output=/dev/null", "--nodelist=node4", "--no-requeue"]
    job = run(*command, "--wrap", "sleep 300")
    state = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    wait_until(lambda: run(*state) == "RUNNING")
    cluster.kill_node("node4")
    wait_until(lambda: run(*state) == "NODE_FAIL", 90)
    cluster.start_node("node4")
    wait_until(lambda: "node4" in cluster.idle_nodes())
