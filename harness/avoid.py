"""Which nodes an experiment stays away from, why, and which it does not though attempts failed on them.

A node is avoided once ``bad_node_after`` attempts have failed on it. Three things keep a mistake that all nodes share from
emptying a partition node by node: a port that was taken is nobody's fault; a cause that was met on several nodes is the
experiment's or the cluster's, unless it is broken hardware or Slurm itself says that the node failed; and never more than
``bad_nodes_share`` of the partition are avoided, nor so many that the runs have no room.

Decided at a submit and when an attempt has failed. The experiment's jobs that wait are told as soon as the decision changes:
a node on which every run ends in its first minute is free soon, and would draw the rest of an array. ``avoided.json`` beside
the runs has the last decision and what became of telling them, for ``status`` and ``why``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.causes import is_hardware, is_port
from harness.cluster import Cluster
from harness.requeue import COUNTED, without_place
from harness.run_folder import hold, read_json, run_folders, write_json
from harness.scheduler import SlurmError, ask_slurm, queued

LEAST = 1
"""One node may be avoided however small the partition is, as long as the runs have room without it."""


@dataclass(frozen=True)
class Failure:
    """An attempt that failed on a node. ``of_the_node``: told by what cannot be another's fault."""

    node: str
    run: str
    reason: str
    of_the_node: bool = False

    @property
    def cause(self) -> str:
        """The reason without what differs from node to node and from time to time: names, numbers, addresses."""
        return re.sub(r"(#[,;:.]?\s*)+", "# ", re.sub(r"\S*\d\S*", "#", self.reason)).strip()


@dataclass(frozen=True)
class Avoided:
    """Node -> why, of those that are avoided and of those that failed as often and are not.

    ``unheard``: why the jobs that wait could not be told of a change, "" where they were.
    """

    nodes: dict[str, str] = field(default_factory=dict)
    spared: dict[str, str] = field(default_factory=dict)
    unheard: str = ""

    def lines(self) -> list[str]:
        """What a person reads."""
        said = [f"Avoided: {node}: {why}" for node, why in self.nodes.items()]
        said += [f"Not avoided: {node}: {why}" for node, why in self.spared.items()]
        if self.unheard:
            said.append(f"Runs that wait were not told, and may start there: {self.unheard}")
        return said


def failures(scale_folder: Path) -> list[Failure]:
    """Every failed attempt of the experiment under each node that it blames, the oldest of a run first.

    ``lost_nodes`` of its end.json says whom; [] is nobody. Without it the job's own node was where it happened.
    """
    found = []
    for folder in run_folders(scale_folder):
        for attempt in folder.attempts:
            end = read_json(attempt / "end.json") or {}
            if COUNTED.get(end.get("state", "")) != "failed":
                continue
            reason = without_place(end.get("reason", ""))
            if is_port(reason):
                continue
            start = read_json(attempt / "start.json") or {}
            blamed = end.get("lost_nodes", [start.get("slurmd_nodename")])
            sure = is_hardware(reason) or "written_by" in end  # the second: by Slurm's account
            found += [Failure(node, folder.name, reason, sure) for node in blamed if node]
    return found


def decide(found: Sequence[Failure], after: int, at_most: int) -> Avoided:
    """Pure. ``at_most``: how many nodes may be avoided; the ones with most failures come first."""
    met_on: dict[str, set[str]] = {}
    by_node: dict[str, list[Failure]] = {}
    for failure in found:
        met_on.setdefault(failure.cause, set()).add(failure.node)
        by_node.setdefault(failure.node, []).append(failure)
    bad: dict[str, str] = {}
    spared: dict[str, str] = {}
    for node, of_node in sorted(by_node.items(), key=lambda item: (-len(item[1]), item[0])):
        own = [f for f in of_node if f.of_the_node or len(met_on[f.cause]) == 1]
        last = (own or of_node)[-1]
        words = f"{len(own)} failures, the last of {last.run}: {last.reason}"
        if len(own) >= after and len(bad) < at_most:
            bad[node] = words
        elif len(own) >= after:
            spared[node] = f"{words}; no more than {at_most} of the nodes may be avoided"
        elif len(of_node) >= after:
            others = sorted(met_on[of_node[-1].cause] - {node})
            shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            spared[node] = f"what failed there failed on {shown} too: {of_node[-1].reason}"
    return Avoided(bad, spared)


def room(cluster: Cluster, needed: int) -> int:
    """How many nodes may be avoided, of runs that take ``needed`` of the partition's. Raises SlurmError."""
    partition = cluster.directives.get("partition", cluster.partition)
    where = [f"--partition={partition}"] if partition else []
    lines = ask_slurm("sinfo", "--noheader", "--Node", *where, "--format=%N|%P").splitlines()
    listed = [line.partition("|") for line in lines]
    # Without a name Slurm takes its default, which it marks.
    names = {node for node, _, of in listed if partition or of.strip().endswith("*")}
    share = max(LEAST, int(cluster.bad_nodes_share * len(names)))
    return max(0, min(share, len(names) - needed))


def avoided(scale_folder: Path, cluster: Cluster) -> Avoided:
    """The decision of this moment; the last one where Slurm does not say how many nodes there are."""
    found = failures(scale_folder)
    if not found:
        return Avoided()
    needed = max(f.run["resources"].get("nodes", 1) for f in run_folders(scale_folder))
    try:
        return decide(found, cluster.bad_node_after, room(cluster, needed))
    except SlurmError:
        return last_decision(scale_folder)


def steer(scale_folder: Path, cluster: Cluster, requeued: str | None = None) -> Avoided:
    """Decide, have the experiment's jobs that wait start on no avoided node, and keep the decision in ``avoided.json``.

    One question to Slurm and one update, where the decision has changed or the last was not heard; ``requeued``, a job that
    has just gone back into the queue, is told in any case. What fails is in ``unheard``, and the next call tries again.
    """
    path = scale_folder / "avoided.json"
    with hold(scale_folder / "avoided.lock", wait=True):  # of two decisions the later is told last
        before, now = last_decision(scale_folder), avoided(scale_folder, cluster)
        now = replace(now, unheard="")
        news = now.nodes.keys() != before.nodes.keys() or before.unheard
        try:
            wait = waiting(scale_folder) if news else set()
            keep_away(wait | ({requeued} - {None}), cluster.avoiding(sorted(now.nodes)))
        except SlurmError as error:
            now = replace(now, unheard=str(error))
        if now != before:
            write_json(path, asdict(now))
    return now


def waiting(scale_folder: Path) -> set[str]:
    """Ids of the experiment's jobs that wait. Raises SlurmError."""
    own = set((read_json(scale_folder / "slurm.json") or {}).values())
    if not own:
        return own
    return {job_id for job_id, job in queued(fresh=True).items() if job.waits} & own


def keep_away(job_ids: Collection[str], nodes: str) -> None:
    """Have these jobs, which wait, start on none of ``nodes`` ("": on any); it is too late for some. Raises SlurmError."""
    arrays: dict[str, list[str]] = {}
    for job_id in sorted(job_ids):
        array, _, task = job_id.partition("_")
        arrays.setdefault(array, []).append(task)
    named = [f"{array}_[{','.join(t)}]" if all(t) else array for array, t in arrays.items()]
    if not named:
        return
    try:
        ask_slurm("scontrol", "update", f"JobId={','.join(named)}", f"ExcNodeList={nodes}")
    except SlurmError as error:
        if "no longer pending" not in str(error):
            raise


def last_decision(scale_folder: Path) -> Avoided:
    return Avoided(**(read_json(scale_folder / "avoided.json") or {}))
