"""Runs over several nodes: a Ray cluster of real raylets, one a Slurm node, and what becomes of it."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil
import pytest

from harness.cluster import Cluster, RaySettings
from harness.expand import Expansion, expand
from harness.experiment_file import Resources
from harness.processes import MARK
from harness.ray_node import Layout
from harness.run_folder import RunFolder, read_json, tail_records
from harness.slurm import cancel_jobs
from harness.spec import load
from harness.why import account
from molt_core.models.load import content_hash
from slurm.local import cluster
from tests.harness.conftest import TRAIN
from tests.slurm.conftest import LOCAL, run, send, settled, wait_until

JOINED = """
import ray
beat("starting", 0)
ray.init(log_to_driver=False)
names = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
(run / "nodes").write_text(" ".join(names))
"""


def processes_of(folder: RunFolder) -> dict[str, dict[int, str]]:
    """Slurm node -> the run's processes on it with their command lines, seen from outside all nodes."""
    found: dict[str, dict[int, str]] = {}
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if variables.get(MARK) == folder.mark:
                name = variables["SLURMD_NODENAME"]
                found.setdefault(name, {})[process.pid] = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def small(**ray) -> Cluster:
    return LOCAL.model_copy(update={"ray": RaySettings(object_store_gb=0.1, **ray)})


def one_run(light, train: str, profile=None) -> tuple[RunFolder, Expansion]:
    """A run over two nodes, submitted."""
    expansion = light(train=train, seeds="[0]", cpus=2, resources=", nodes: 2")
    name = next(r.name for r in expansion.replicates if r.system == "ours")
    send(expansion, profile or small(), only=name)
    return RunFolder(expansion.folder / name), expansion


def test_a_node_that_does_not_join_is_named_and_the_run_goes_back(light):
    """A node that hangs: whatever the first attempt starts there stands still at once."""
    folder, expansion = one_run(light, JOINED + TRAIN, small(join_within_s=25))
    hung: set[str] = set()

    def ended():
        start = folder.attempts and read_json(folder.attempts[0] / "start.json")
        for node, processes in processes_of(folder).items() if start else ():
            if node != start["slurmd_nodename"]:
                hung.add(node)
                for pid in processes:
                    with suppress(psutil.NoSuchProcess):
                        psutil.Process(pid).suspend()
        return start and read_json(folder.attempts[0] / "end.json")

    end = wait_until(ended, 120)
    wait_until(lambda: len(folder.attempts) > 1, 90)
    cancel_jobs(expansion.folder, [folder.name])
    assert settled(expansion)[folder.name] == "KILLED"
    assert end["state"] == "NODE_FAIL" and set(end["lost_nodes"]) == hung
    assert f"{', '.join(hung)} did not join the Ray cluster within 25 s" in end["reason"]
    assert "back into the queue: failed 1 of at most 3 times" in end["reason"]


def test_nodes_that_die_are_named_the_run_goes_on_elsewhere_and_a_cancel_leaves_no_process(light):
    """First one that the job is not on, which Ray's head notices; then the job's own, which only Slurm can."""
    body = JOINED + "record(attempt); beat('training', attempt); time.sleep(600)\n"
    folder, expansion = one_run(light, body, small().model_copy(update={"bad_node_after": 9}))

    def lose(number: int, own: bool) -> str:
        """The node that was switched off under that attempt; returns when the next one is at work."""
        wait_until(lambda: (folder.heartbeat or {}).get("step") == number, 120)
        head = read_json(folder.attempts[number - 1] / "start.json")["slurmd_nodename"]
        (other,) = set((folder.path / "nodes").read_text().split()) - {head}
        lost = head if own else other
        cluster.kill_node(lost)
        try:
            wait_until(lambda: (folder.heartbeat or {}).get("step") == number + 1, 240)
            assert set(processes_of(folder)) == set((folder.path / "nodes").read_text().split())
        finally:
            cluster.start_node(lost)
        return lost

    for number, own in ((1, False), (2, True)):
        lost = lose(number, own)
        end = read_json(folder.attempts[number - 1] / "end.json")
        assert end["state"] == "NODE_FAIL" and end["lost_nodes"] == [lost]
        assert f"{lost} failed" in end["reason"] if own else f"{lost} is lost" in end["reason"]
        assert lost not in (folder.path / "nodes").read_text()
    cancel_jobs(expansion.folder, [folder.name])
    assert settled(expansion)[folder.name] == "KILLED"
    wait_until(lambda: processes_of(folder) == {}, 10)
    wait_until(lambda: lost in cluster.idle_nodes())


HANGS = """
import signal, threading
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
@ray.remote(num_cpus=1)
class Rank:
    def wait_for_ever(self):
        threading.Event().wait()
def deadlock():
    threading.Event().wait()
def save(*_):
    (run / "saved").write_text(str(attempt))
    sys.exit(4)
signal.signal(signal.SIGUSR2, save)
record(1, wall_s=0.1); beat("training", attempt)
if attempt == 2:
    time.sleep(600)
for node in ray.nodes():
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    rank = Rank.options(scheduling_strategy=there).remote()
    rank.wait_for_ever.remote()
    ranks = [*globals().get("ranks", []), rank]
deadlock()
"""
"""A trainer whose driver waits for ranks on every node, which wait for each other; its second attempt for a signal to save."""


def test_a_taken_port_a_preemption_and_a_hang_of_a_run_over_two_nodes_in_containers(boxed):
    """One run meets all three. Under pyxis each node of Ray is a step of its own, which is no descendant of what starts it."""
    body = JOINED + "(run / 'devices').write_text(str(ray.cluster_resources()['GPU']))\n" + HANGS
    resources = ", nodes: 2, device: cuda, devices_per_node: 8, hang_after_s: 20"
    expansion, profile = boxed("pyxis", body, resources=resources, cpus=2)
    name = next(r.name for r in expansion.replicates if r.system == "ours")
    where = {"partition": "low", "sbatch": {"exclude": "node1,node4"}}
    quick = {"ray": small().ray, "bad_node_after": 1, **where}
    job = send(expansion, profile.model_copy(update=quick), only=name)[name]
    folder = RunFolder(expansion.folder / name)

    others = Layout.of(("a", "b"), Resources(nodes=2), small().ray, int(job.partition("_")[0]))
    with socket.create_server(("127.0.0.1", others.ports("b")["node-manager-port"])):
        first = wait_until(lambda: folder.attempts and read_json(folder.attempts[0] / "end.json"))
    assert first["state"] == "INFRA" and "ports in use already" in first["reason"]
    assert first["lost_nodes"] == [] and not account(folder).avoids

    wait_until(lambda: (folder.heartbeat or {}).get("step") == 2, 90)
    head = read_json(folder.attempts[1] / "start.json")["slurmd_nodename"]
    (worker,) = {"node2", "node3"} - {head}
    wanted = f"--nodelist={worker}"  # the run loses the node that its job is not on
    high = ["sbatch", "--partition=main", wanted, "--exclusive", "--output=/dev/null"]
    run(*high, "--wrap", "sleep 1")
    wait_until(lambda: len(folder.attempts) > 2, 60)
    second = read_json(folder.attempts[1] / "end.json")
    assert (folder.path / "saved").read_text() == "2" and second["exit_code"] == 4
    assert second["reason"].startswith("PREEMPTED: preempted on node[2-3]; back into the queue")

    assert settled(expansion, 180)[name] == "HANG"
    assert processes_of(folder) == {}
    assert (folder.path / "nodes").read_text() == "node2 node3"
    assert float((folder.path / "devices").read_text()) == 16
    head = read_json(folder.attempts[2] / "start.json")["slurmd_nodename"]
    told = account(folder)
    assert told.status.why.startswith("no progress for") and "training at step 3" in told.status.why
    stacks: dict[bool, list[str]] = {True: [], False: []}  # of the head's node, of the other
    for file in map(Path, told.stacks):
        assert file.parent.name in ("stacks", *{"node2", "node3"} - {head})
        stacks[file.parent.name == "stacks"].append(file.read_text())
    assert [text for text in stacks[True] if "in deadlock" in text]
    for texts in stacks.values():
        assert [text for text in texts if "in wait_for_ever" in text]


STEPS = 8
AGENT = '''
from molt_core.agents.base import Result


class Parity:
    """Rewards an even sum of sampled ids, so that an untrained policy has something to learn from."""

    def __init__(self, task) -> None: ...

    async def run(self, context) -> Result:
        generation = await context.generate(context.prompt.token_ids, context.prompt.images)
        return Result(float(sum(generation.token_ids) % 2 == 0))
'''
EXPERIMENT = """
name: spread
question: Is a run over several nodes the run on one?
protocol:
  model: {{path: {checkpoint}, max_length: 96}}
  task: {{source: shapes, agent: "parity:Parity", eval_items: 8}}
  rollout: {{groups_per_step: 4, samples_per_prompt: 4, sampling: {{max_new_tokens: 8}}}}
  loop: {{steps: {steps}, schedule: lockstep, max_staleness: 1}}
  evaluation: {{every: {steps}}}
  engine: {{max_sequences: 64, kv_cache_blocks: 256}}
systems:
  ranks: {{role: baseline, trainer: {{backend: fsdp2, world_size: 2}}}}
  rank: {{role: candidate, trainer: {{backend: fsdp2}}}}
seeds: [0]
endpoints:
  - {{name: reward, field: eval_reward_mean, summary: at_last_step, unit: share, direction: higher,
     scale: absolute, margin: 0.05, margin_reason: none, primary: true}}
scales:
  one: {{resources: {{nodes: 1, cpus_per_node: 3}}}}
  two: {{resources: {{nodes: 2, cpus_per_node: 2}}}}
  four: {{resources: {{nodes: 4, cpus_per_node: 1}}}}
"""
TITLES = {"engine": ("ray::RolloutWorker", "VLLM::"), "trainer": ("ray::TrainerRank",)}
"""What their processes call themselves. The weights arrive in vLLM's own process, where it has one."""
VARIES = ("time_unix", "wall_s", "memory_peak_bytes")


@dataclass(frozen=True)
class Seen:
    """A run that is done, and what was seen of it from outside."""

    folder: RunFolder
    nodes: dict[str, set[str]]
    """Engine and trainer -> the nodes on which its processes were."""
    received: tuple[int, int]
    """At one moment late in the run: bytes that the kernel had counted into the engine's connection with a trainer rank,
    and bytes of weights that the steps recorded until then had sent."""

    def records(self) -> list[dict]:
        lines = self.folder.metrics.read_text().splitlines()
        return [
            {k: v for k, v in json.loads(line).items() if k not in VARIES and k[:2] != "t_"}
            for line in lines
        ]


def connections() -> list[tuple[int, str, str, int]]:
    """(process, own end, other end, bytes received) of every TCP connection of this machine, by the kernel's account."""
    found = []
    listed = run("ss", "--tcp", "--info", "--processes", "-nHO", "state", "established")
    for line in listed.splitlines():
        owner, count = re.search(r"pid=(\d+)", line), re.search(r"bytes_received:(\d+)", line)
        own, other = (end.replace("[::ffff:", "").replace("]", "") for end in line.split()[2:4])
        if owner:
            found.append((int(owner[1]), own, other, int(count[1]) if count else 0))
    return found


def work(tmp_path: Path, checkpoint: Path, scale: str) -> Seen:
    """One run of the experiment's two-rank arm at ``scale``, watched."""
    (tmp_path / "parity.py").write_text(AGENT)
    file = tmp_path / "spread.yaml"
    file.write_text(EXPERIMENT.format(checkpoint=checkpoint, steps=STEPS))
    expansion = expand(load(file, base=tmp_path), scale, tmp_path / "runs", base=tmp_path)
    name = next(r.name for r in expansion.replicates if r.system == "ranks")
    send(expansion, small(), only=name)
    folder = RunFolder(expansion.folder / name)
    nodes: dict[str, set[str]] = {kind: set() for kind in TITLES}
    moments = [(0, 0)]

    def ended():
        sent = sum(record.get("refit_bytes", 0) for record in tail_records(folder.metrics, 99))
        pids: dict[str, set[int]] = {kind: set() for kind in nodes}
        for node, processes in processes_of(folder).items():
            for pid, line in processes.items():
                for kind, titles in TITLES.items():
                    if line.startswith(titles):
                        nodes[kind].add(node)
                        pids[kind].add(pid)
        every = connections()
        trainers = {own for pid, own, _, _ in every if pid in pids["trainer"]}
        engine = [c for pid, _, other, c in every if pid in pids["engine"] if other in trainers]
        moments.append((max(engine, default=0), sent))
        return folder.end

    wait_until(ended, 400)
    said = (folder.attempts[-1] / "output.log").read_text()
    assert folder.done is not None, said
    assert processes_of(folder) == {} and "ended_with_it" not in folder.end
    return Seen(folder, nodes, max(moments))


@pytest.fixture(scope="module")
def spread(tiny_checkpoint, tmp_path_factory):
    """spread(scale) -> Seen; each scale is worked once."""
    folder = tmp_path_factory.mktemp("spread")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # where the agent is
        yield lru_cache(lambda scale: work(folder, tiny_checkpoint, scale))


@pytest.mark.engine
@pytest.mark.parametrize("scale", ["two", "four"])
def test_engine_and_ranks_lie_on_nodes_of_their_own_and_weights_go_over_a_socket(spread, scale):
    seen = spread(scale)
    engine, ranks = seen.nodes["engine"], seen.nodes["trainer"]
    assert len(engine) == 1 and len(ranks) == (1 if scale == "two" else 2)
    assert not engine & ranks
    placed = read_json(seen.folder.attempts[-1] / "placement.json")
    assert set(placed["engine"]) == engine and set(placed["trainer"]) == ranks
    received, sent = seen.received
    each = seen.records()[-1]["refit_bytes"]
    # The kernel's count, while the run was at work: all weights sent until then, the initial ones too.
    assert received >= sent + each and sent >= 2 * each >= 2e6


@pytest.mark.engine
@pytest.mark.parametrize("scale", ["two", "four"])
def test_under_lockstep_several_nodes_do_what_one_does(spread, scale):
    one, several = spread("one"), spread(scale)
    assert several.records() == one.records()
    policies = [
        content_hash(seen.folder.path / "checkpoints" / "policy") for seen in (one, several)
    ]
    assert (
        policies[0] == policies[1] != content_hash(Path(one.folder.run["config"]["model"]["path"]))
    )
