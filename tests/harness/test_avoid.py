"""Which nodes an experiment avoids: those that fail by themselves, never all that a common mistake has touched."""

from __future__ import annotations

import pytest

from harness.avoid import Failure, decide, failures, last_decision, room, steer
from harness.cluster import Cluster
from harness.run_folder import RunFolder, write_json
from harness.why import account
from tests.harness.conftest import put_on_path

ECC = "INFRA: exit code 1: RuntimeError: CUDA error: uncorrectable ECC error encountered"
IMAGE = "NODE_FAIL: Ray ended on {}, srun with code 1: 0: [Errno 2] /images/{}.sqsh: no such image"


def attempt(folder: RunFolder, node: str, reason: str, **end) -> None:
    made = folder.new_attempt()
    write_json(made / "start.json", {"slurmd_nodename": node})
    write_json(
        made / "end.json",
        {"state": reason.partition(":")[0], "reason": reason, "duration_s": 1.0, **end},
    )


def image(node: str) -> Failure:
    return Failure(node, "ours-s0", IMAGE.format(node, node))


def test_a_node_is_avoided_when_runs_failed_on_it_and_not_when_they_were_preempted(make_run):
    for name, node, reason in (
        ("molt-s0-1", "node1", ECC),
        ("molt-s1-2", "node1", "NODE_FAIL: node1 is lost"),
        ("molt-s2-3", "node2", ECC),
        ("molt-s3-4", "node3", "PREEMPTED: preempted on node3"),
        ("molt-s4-5", "node3", "PREEMPTED: preempted on node3"),
        ("molt-s5-6", "node4", "FAILED: exit code 1: ValueError: no"),
        ("molt-s6-7", "node4", "FAILED: exit code 1: ValueError: no"),
    ):
        folder = make_run(name)
        attempt(folder, node, reason)
    decision = decide(failures(folder.path.parent), after=2, at_most=4)
    assert list(decision.nodes) == ["node1"] and decision.spared == {}
    assert decision.nodes["node1"] == (
        "2 failures, the last of molt-s1-2: NODE_FAIL: node1 is lost"
    )


def test_a_cause_that_was_met_on_several_nodes_counts_against_none():
    """A broken image, tried twice on each of four nodes."""
    every = [image(node) for node in ("gpu1", "gpu2", "gpu3", "gpu4") for _ in range(2)]
    assert list(decide(every[:2], after=2, at_most=4).nodes) == ["gpu1"]
    decision = decide(every, after=2, at_most=4)
    assert decision.nodes == {} and set(decision.spared) == {"gpu1", "gpu2", "gpu3", "gpu4"}
    assert decision.spared["gpu1"].startswith("what failed there failed on gpu2, gpu3, gpu4 too")


def test_broken_hardware_is_each_nodes_own_and_never_more_than_the_share_is_avoided():
    broken = [Failure(f"n{n}", "ours-s0", ECC, of_the_node=True) for n in (1, 2, 2, 2, 3, 3)]
    decision = decide(broken, after=2, at_most=1)
    assert list(decision.nodes) == ["n2"] and list(decision.spared) == ["n3"]
    assert decision.spared["n3"].endswith("no more than 1 of the nodes may be avoided")


def test_an_attempt_may_blame_nobody(make_run):
    """A head of Ray that did not start, a port that was taken: no node is counted, the job's own as little as another."""
    folder = make_run()
    for _ in range(3):
        attempt(folder, "node1", "INFRA: Ray's head ended with code 1", lost_nodes=[])
        attempt(folder, "node1", "INFRA: exit code 1: OSError: [Errno 98] Address already in use")
    assert failures(folder.path.parent) == []


def test_what_slurm_says_of_a_node_is_that_nodes(make_run):
    """slurmctld lost both, each twice."""
    folder = make_run()
    for node in ("node1", "node2") * 2:
        attempt(folder, node, f"NODE_FAIL: {node} failed", written_by="the next attempt")
    found = failures(folder.path.parent)
    assert list(decide(found, after=2, at_most=4).nodes) == ["node1", "node2"]


@pytest.mark.parametrize(
    ("nodes", "needed", "share", "most"),
    [
        (40, 2, 0.25, 10),
        (4, 1, 0.25, 1),
        (3, 1, 0.25, 1),  # one of few, where there is room
        (2, 2, 0.25, 0),
        (11, 10, 0.5, 1),
    ],
)
def test_runs_keep_room(tmp_path, monkeypatch, nodes, needed, share, most):
    listed = "".join(f"n{n}|main*\\nn{n}|low\\n" for n in range(nodes)) + "other|low\\n"
    put_on_path(tmp_path, monkeypatch, sinfo=f'#!/bin/sh\nprintf "{listed}"\n')
    assert room(Cluster(bad_nodes_share=share), needed) == most


def test_a_person_reads_what_is_avoided_and_why(make_run, tmp_path, monkeypatch):
    folder = make_run()
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    for node in ("node1", "node1", "node2", "node2"):
        attempt(folder, node, ECC)
    four = "".join(f"node{n}|main*\\n" for n in range(1, 5))
    put_on_path(tmp_path, monkeypatch, sinfo=f'#!/bin/sh\nprintf "{four}"\n')
    steer(folder.path.parent, Cluster())
    first, second = account(folder).avoids
    assert first == f"Avoided: node1: 2 failures, the last of {folder.name}: {ECC}"
    assert second.startswith("Not avoided: node2: 2 failures")


FOUR = "".join(f"node{n}|main*\\n" for n in range(1, 5))
UPDATES = """#!/bin/sh
echo "$@" >> "$LAB/updates"
[ -e "$LAB/refuses" ] && { echo 'slurm_update error: Access/permission denied' >&2; exit 1; }
[ -e "$LAB/late" ] && { echo '9_4: Job is no longer pending execution' >&2; echo '9_2,5: No error' >&2; exit 1; }
exit 0
"""


@pytest.fixture
def waits(make_run, lab, monkeypatch):
    """Six runs of array 9: 0 and 1 have failed on node1, 3 works, 2, 4 and 5 wait; another's job waits beside them."""
    put_on_path(lab, monkeypatch, scontrol=UPDATES, sinfo=f'#!/bin/sh\nprintf "{FOUR}"\n')
    folders = [make_run(f"molt-s{number}-00000000") for number in range(6)]
    for folder in folders[:2]:
        attempt(folder, "node1", ECC)
    ids = {folder.name: f"9_{number}" for number, folder in enumerate(folders)}
    write_json(folders[0].path.parent / "slurm.json", ids)
    states = {"9_2": "PENDING", "9_3": "RUNNING", "9_4": "PENDING", "9_5": "PENDING"}
    rows = [f"{job}|{state}|||10:00|N/A|x\n" for job, state in (states | {"8": "PENDING"}).items()]
    (lab / "queued").write_text("".join(rows))
    return folders[0].path.parent


def updates(lab) -> list[str]:
    return (lab / "updates").read_text().splitlines() if (lab / "updates").exists() else []


def test_runs_that_wait_stay_away_from_a_node_that_became_bad(waits, lab):
    """In one update; again only where the decision is another."""
    assert list(steer(waits, Cluster(sbatch={"exclude": "old7"})).nodes) == ["node1"]
    assert updates(lab) == ["update JobId=9_[2,4,5] ExcNodeList=old7,node1"]
    steer(waits, Cluster(sbatch={"exclude": "old7"}))
    assert len(updates(lab)) == 1
    steer(waits, Cluster(bad_node_after=3))  # it is not avoided any more
    assert updates(lab)[1:] == ["update JobId=9_[2,4,5] ExcNodeList="]


def test_a_run_that_goes_back_is_told_though_the_others_know(waits, lab):
    steer(waits, Cluster())
    steer(waits, Cluster(), requeued="9_1")
    assert updates(lab)[1:] == ["update JobId=9_[1] ExcNodeList=node1"]


def test_what_the_waiting_runs_did_not_hear_is_said_and_sent_again(waits, lab):
    (lab / "refuses").touch()
    decision = steer(waits, Cluster())
    assert "node1" in decision.nodes and "permission denied" in decision.lines()[-1]
    assert last_decision(waits) == decision
    (lab / "refuses").unlink()
    assert steer(waits, Cluster()).unheard == ""
    assert len(updates(lab)) == 2


def test_a_run_that_has_started_meanwhile_is_no_failure_of_the_update(waits, lab):
    (lab / "late").touch()
    assert steer(waits, Cluster()).unheard == ""


def test_nothing_is_asked_where_nothing_has_failed(make_run, lab):
    assert steer(make_run().path.parent, Cluster()).nodes == {}
    assert not (lab / "squeue.calls").exists()
