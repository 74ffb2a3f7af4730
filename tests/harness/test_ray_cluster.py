"""What a run over several nodes starts on them, as text. The real thing: tests/slurm/test_nodes.py."""

from __future__ import annotations

import socket
import sys

import pytest

from harness import ray_cluster
from harness.cluster import Cluster, Container, RaySettings
from harness.container import launch
from harness.experiment_file import Resources
from harness.outcome import EXIT_JUDGED, judge_exit
from harness.ray_cluster import Lost, RayCluster, allocated_nodes, launch_line, work
from harness.ray_node import Layout, start_command, taken
from harness.run_folder import RunFolder, write_json

GPU = Resources(nodes=2, device="cuda", devices_per_node=8, cpus_per_node=96)
NODES = ("n7", "n8")


def layout(job_id: int = 41, nodes=NODES, **settings) -> Layout:
    return Layout.of(nodes, GPU, RaySettings(**settings), job_id).at("10.0.0.7")


def options(command: list[str]) -> dict[str, str]:
    pairs = (part.removeprefix("--").partition("=") for part in command if part.startswith("--"))
    return {name: value for name, _, value in pairs}


def test_another_node_is_reached_by_one_task_beside_what_runs_there_with_all_it_has():
    line = launch_line(["n8"], GPU, Cluster(gpu_type="h100"), ["node", "arguments"])
    assert " ".join(line) == (
        "srun --overlap --nodelist=n8 --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=96 --mem=0 --cpu-bind=none "
        "--gpus-per-node=h100:8 --mpi=none --export=ALL --label --kill-on-bad-exit=1 node arguments"
    )


def test_devices_are_asked_for_as_the_profile_says_and_not_where_there_are_none():
    assert "--gres=gpu:8" in launch_line(["n8"], GPU, Cluster(gpus="gres"), ["x"])
    cpu = Resources(nodes=2, cpus_per_node=4)
    assert not [part for part in launch_line(["n8"], cpu, Cluster(), ["x"]) if "gpu" in part]


def test_the_head_listens_where_the_others_join():
    head = options(start_command(layout(), "n7", "10.0.0.7", "/tmp/m1", "python"))
    other = options(start_command(layout(), "n8", "10.0.0.8", "/tmp/m2", "python"))
    assert other["address"] == f"10.0.0.7:{head['port']}"
    assert "head" in head and "head" not in other and "port" not in other
    assert (head["num-cpus"], head["num-gpus"]) == (other["num-cpus"], other["num-gpus"])
    assert (other["num-cpus"], other["num-gpus"], other["node-name"]) == ("96", "8", "n8")
    assert (other["temp-dir"], other["node-ip-address"]) == ("/tmp/m2", "10.0.0.8")


def test_no_two_nodes_of_a_job_and_no_two_neighbouring_jobs_share_a_port():
    seen: set[int] = set()
    for job_id in range(1000, 1020):
        for name in ("a", "b", "c", "d"):
            of_job = layout(job_id, ("a", "b", "c", "d"), port_base=21000)
            said = options(start_command(of_job, name, "10.0.0.7", "/tmp/m", "python"))
            ports = {int(v) for k, v in said.items() if k.endswith("port") and v != "0"}
            assert len(ports) == (8 if name == "a" else 6) and not ports & seen
            assert 21000 <= min(ports) and max(ports) < 32768  # above: the kernel gives them away
            seen |= ports


def test_neighbouring_jobs_of_other_numbers_of_nodes_share_no_port_wherever_they_meet():
    """Forty jobs of one to seven nodes, every third of them started again; on a node may be any place of each."""
    seen: set[int] = set()
    for job_id in range(1000, 1040):
        nodes = [f"n{place}" for place in range(1 + job_id % 7)]
        made = Layout.of(nodes, GPU, RaySettings(), job_id, int(job_id % 3 == 0))
        ports = {port for name in nodes for port in made.ports(name).values()}
        assert not ports & seen
        seen |= ports


def test_a_job_that_is_started_again_has_other_ports():
    first, again = (Layout.of(NODES, GPU, RaySettings(), 41, restarts) for restarts in (0, 1))
    ports = [{*at.ports("n7").values(), *at.ports("n8").values()} for at in (first, again)]
    assert not ports[0] & ports[1]


def test_a_port_on_which_something_listens_is_found():
    with socket.socket() as listener, socket.socket() as free:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        free.bind(("127.0.0.1", 0))  # bound and not listening: closed below, so free
        numbers = [listener.getsockname()[1], free.getsockname()[1]]
        free.close()
        assert taken(numbers) == numbers[:1]


def test_a_port_that_was_taken_is_nobodys_fault_nor_is_memory_that_was_short(tmp_path):
    log = tmp_path / "ray.log"
    ray = RayCluster(layout(), GPU, Cluster(), tmp_path, log)
    log.write_text(
        "1: n8: ports in use already: 20008; see ray.port_base of the profile\nsrun: x\n"
    )
    lost = ray._lost("Ray ended on n8", ["n8"])
    assert (lost.reason, lost.nodes) == ("INFRA", []) and "20008" in str(lost)
    log.write_text("1: slurmstepd: error: Detected 1 oom_kill event in StepId=3.0.\nsrun: x\n")
    lost = ray._lost("Ray ended on n8", ["n8"])
    assert (lost.reason, lost.nodes) == ("OOM", [])
    log.write_text("srun: error: n8: task 0: Exited with exit code 1\n")
    assert (ray._lost("Ray ended on n8", ["n8"]).reason) == "NODE_FAIL"


def test_what_a_node_is_told_survives_the_way():
    assert Layout.load(layout(object_store_gb=0.5).dump()) == layout(object_store_gb=0.5)


@pytest.mark.parametrize("here, first", [("n3", ["n3", "n4", "n5"]), ("n5", ["n5", "n3", "n4"])])
def test_the_head_is_this_node(monkeypatch, tmp_path, here, first):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "n[3-5]" ] && printf "n3\\nn4\\nn5\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3-5]")
    monkeypatch.setenv("SLURMD_NODENAME", here)
    assert allocated_nodes() == first


def test_in_a_container_of_pyxis_a_node_of_ray_is_a_step_on_that_very_node():
    line = launch(Container(runtime="pyxis", image="/image.sqsh"), ["ray", "start"], node="n8")
    assert line[0] == "srun" and line[-2:] == ["ray", "start"]
    assert "--nodelist=n8" in line and not [part for part in line if "relative" in part]


def test_ray_is_started_by_the_python_that_the_run_has():
    assert start_command(layout(), "n7", "10.0.0.7", "/tmp/m", sys.executable)[0] == sys.executable


def test_a_lost_node_is_no_want_of_memory_on_this_one(make_run):
    folder = make_run()
    attempt = folder.new_attempt()
    lost = {"reason": "NODE_FAIL", "detail": "n8 is lost", "nodes": ["n8"]}
    write_json(attempt / "reason.json", lost)
    said = judge_exit(folder, attempt, EXIT_JUDGED, killed_for_memory=True)
    assert said == ("NODE_FAIL", "n8 is lost")
    write_json(attempt / "reason.json", {"reason": "WORKER_DIED", "detail": "an actor died"})
    assert judge_exit(folder, attempt, EXIT_JUDGED, killed_for_memory=True)[0] == "OOM"


def test_a_node_whose_name_is_not_found_is_no_outcome_of_the_run(monkeypatch, tmp_path):
    """A name that only Slurm knows: the run did nothing wrong, and `retry` may go on."""
    folder = RunFolder(tmp_path / "scale" / "run")
    attempt = folder.path / "attempts" / "01"
    attempt.mkdir(parents=True)
    resources = {"nodes": 2, "device": "cpu", "cpus_per_node": 4, "time_limit": "00:10:00"}
    monkeypatch.setattr(ray_cluster, "allocated_nodes", lambda: ["n3", "no-such-node.invalid"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(Lost, match="cannot be told or reached") as caught:
        work(folder, {"resources": resources}, attempt)
    assert (caught.value.reason, caught.value.nodes) == ("INFRA", [])
