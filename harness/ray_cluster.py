"""A run over several nodes: its Ray cluster is started, watched and ended around its command.

    python -m harness.ray_cluster RUN_DIR        (harness.job does so inside an allocation of several nodes)

One node of Ray on each node of the allocation (``harness/ray_node.py``), the head on this one, the others through srun. The
command starts once all of them are alive, with RAY_ADDRESS in its environment; it gets the signals that this process gets.
A node that does not join, or is lost, ends the run as NODE_FAIL with its name, so that it goes back into the queue. Nothing
outlives this process: the command and the head are its children, and the others end with their step of Slurm.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.causes import is_memory, is_port
from harness.cluster import Cluster
from harness.command import command_line, environment, own_variables
from harness.container import command_pid, own_code
from harness.experiment_file import Resources
from harness.outcome import CRASHES, EXIT_CONFIG, EXIT_JUDGED, EXIT_STOPPED, last_lines
from harness.processes import become_subreaper, reap, signalled_when_parent_dies
from harness.ray_node import END, STACKS, Layout, address_towards
from harness.requeue import profile
from harness.run_folder import RunFolder, write_json
from harness.sbatch import devices_asked
from harness.scheduler import SlurmError, ask_slurm

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGABRT)
WATCHED = (signal.SIGCHLD, *FORWARDED)
HEALTH = {"period_ms": 2000, "timeout_ms": 5000, "failure_threshold": 5}
"""How Ray's head asks its nodes whether they live. A node that refuses is dead after 10 s, a silent one after 35 s."""
LOST_WITHIN_S = 15.0
"""How long a command that failed is not believed: a lost node may be the cause, which Ray's head knows a little later."""
LOOK_S = 2.0
"""How often the head is asked while the command works."""
END_S, KILLED_S = 8.0, 2.0
"""Time that the nodes have to end in, and that the kernel has after it."""
SRUN_NAMES = re.compile(r"^srun: error: ([^:\s]+): task", re.MULTILINE)
"""How srun names the node on which its task ended."""


class Lost(RuntimeError):
    """The cluster, or a part of it, is not there. ``reason``: the run's state; ``nodes``: those at fault."""

    def __init__(self, reason: str, detail: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(detail)
        self.reason, self.nodes = reason, list(nodes)


class Signalled(RuntimeError):
    """A signal came before the command was started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def launch_line(
    nodes: Sequence[str], resources: Resources, cluster: Cluster, command: Sequence[str]
) -> list[str]:
    """The command line which starts ``command`` once on each of ``nodes``, other nodes of this allocation."""
    devices = devices_asked(cluster, resources) if resources.device == "cuda" else {}
    return [
        *("srun", "--overlap", f"--nodelist={','.join(nodes)}"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        # Said again: not every version of srun takes them over from the batch job, nor binds a task to all of its cores.
        *(f"--cpus-per-task={resources.cpus_per_node}", "--mem=0", "--cpu-bind=none"),
        *(f"--{key}={value}" for key, value in devices.items()),
        *("--mpi=none", "--export=ALL", "--label", "--kill-on-bad-exit=1"),
        *command,
    ]


def allocated_nodes() -> list[str]:
    """The allocation's nodes, this one first."""
    named = ask_slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    here = os.environ["SLURMD_NODENAME"]
    return [here, *(name for name in named if name != here)]


class RayCluster:
    """The processes of one cluster. ``start``, ``wait_for_all``, ``check``, ``end``."""

    def __init__(
        self, layout: Layout, resources: Resources, cluster: Cluster, run_dir: Path, log: Path
    ) -> None:
        self.layout, self.log = layout, log
        node = [sys.executable, "-m", "harness.ray_node", str(run_dir), layout.dump()]
        self.lines = [node, launch_line(layout.nodes[1:], resources, cluster, node)]
        self.processes: list[subprocess.Popen] = []
        self._gcs: Any = None
        self._looked = 0.0

    def start(self) -> None:
        health = {f"RAY_health_check_{key}": str(value) for key, value in HEALTH.items()}
        parent = os.getpid()

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
            signalled_when_parent_dies(signal.SIGTERM, parent)

        # The head's files lie in this job's own folder; on another node it is not there, but what it lies in is.
        scratch = Path(os.environ["TMPDIR"])
        with open(self.log, "ab") as log:
            self.processes = [
                subprocess.Popen(
                    line,
                    stdin=subprocess.PIPE,  # by which a node is told what to do; srun hands it to each
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **health, "TMPDIR": str(folder)},
                    start_new_session=True,
                    preexec_fn=in_child,
                )
                for line, folder in zip(self.lines, (scratch, scratch.parent), strict=True)
            ]

    def wait_for_all(self, within_s: float) -> float:
        """Return the seconds until every node is alive. Raises Lost with the names of those that are not ``within_s``."""
        began = time.monotonic()
        missing = set(self.layout.nodes)
        while missing:
            caught = signal.sigtimedwait(WATCHED, 0.2)
            if caught is not None and caught.si_signo in FORWARDED:
                raise Signalled(caught.si_signo)
            self._ended(reap(), sorted(missing))
            known, before = self.known(), missing
            missing = {name for name in self.layout.nodes if not known.get(name)}
            for name in sorted(before - missing):  # a sign of life in the log too
                print(f"Ray: {name} is there, {time.monotonic() - began:.1f} s", flush=True)
            if missing and time.monotonic() - began > within_s:
                raise self._lost(self._absent(missing, f"within {within_s:.0f} s"), sorted(missing))
        return time.monotonic() - began

    def known(self) -> Mapping[str, bool]:
        """Node name -> whether it is alive, as the head knows; {} before the head listens, or where it does not answer."""
        if self._gcs is None:
            try:
                socket.create_connection((self.layout.head, self.layout.port), 1.0).close()
            except OSError:
                return {}
            from ray._raylet import GcsClient  # what `ray health-check` asks with

            self._gcs = GcsClient(address=self.layout.address)
        from ray.exceptions import RpcError

        try:
            infos = self._gcs.get_all_node_info(timeout=5).values()
        except RpcError:
            return {}
        return {info.node_name: info.state == info.ALIVE for info in infos}

    def check(self, ended: Mapping[int, int], patience_s: float = 0.0) -> None:
        """Raise Lost where a node is gone, looking for it as long as ``patience_s``. ``ended``: what ``reap`` has returned."""
        self._ended(ended, [])
        if not patience_s and time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        if dead := self._dead(patience_s):
            words = f"{', '.join(dead)} is lost: its part of the Ray cluster does not answer"
            raise Lost("NODE_FAIL", words, dead)

    def _dead(self, patience_s: float) -> list[str]:
        """Names of nodes that were alive and are not, as soon as the head knows of one; [] after ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while True:
            dead = sorted(name for name, alive in self.known().items() if not alive)
            if dead or time.monotonic() >= deadline:
                return dead
            signal.sigtimedwait([signal.SIGCHLD], 0.5)
            self._ended(reap(), [])

    def _ended(self, ended: Mapping[int, int], missing: Sequence[str]) -> None:
        """Raise Lost where the head's process or srun is among ``ended``. ``missing``: nodes that have not joined yet."""
        for place, process in enumerate(self.processes):
            if process.pid not in ended:
                continue
            code = process.returncode = ended[process.pid]
            if place == 0:
                raise Lost("INFRA", f"Ray's head ended with code {code}: {self._words()}")
            others = self.layout.nodes[1:]
            named = [
                name for name in re.findall(SRUN_NAMES, self.log.read_text()) if name in others
            ]
            late = [name for name in missing if name in others]
            nodes = named[:1] or late or self._dead(LOST_WITHIN_S)
            who = f"Ray ended on {', '.join(nodes or others)}"
            raise self._lost(f"{who}, srun with code {code}: {self._words()}", nodes)

    def _lost(self, words: str, nodes: Sequence[str]) -> Lost:
        """NODE_FAIL of ``nodes``; where the log says that a port was taken, or memory was short, no node's fault."""
        for reason, is_it in (("INFRA", is_port), ("OOM", is_memory)):
            said = [line.strip() for line in last_lines(self.log) if is_it(line)]
            if said:
                return Lost(reason, f"{words}; {said[-1]}")
        return Lost("NODE_FAIL", words, nodes)

    def write_stacks(self, folder: Path, patience_s: float = 4.0) -> None:
        """Have the processes on the other nodes write their stacks, and wait until each node has begun to.

        By a word and no signal: srun may hand one to every process of the step, and most end by it.
        """
        self._tell(self.processes[1], STACKS)
        deadline = time.monotonic() + patience_s
        waiting = set(self.layout.nodes[1:])
        while waiting and time.monotonic() < deadline:
            signal.sigtimedwait([signal.SIGCHLD], 0.1)
            written = {file.parent.name for file in folder.glob("*/*.txt") if file.stat().st_size}
            waiting -= written

    def _absent(self, missing: set[str], when: str) -> str:
        names = ", ".join(sorted(missing))
        return f"{names} did not join the Ray cluster {when}; last words: {self._words()}"

    def _words(self) -> str:
        return next(iter(line for line in reversed(last_lines(self.log)) if line.strip()), "none")

    def end(self) -> None:
        """Tell every node to end, wait, kill what stays here. What stays elsewhere Slurm ends with the job."""
        for process in self.processes:
            self._tell(process, END)
        self._wait(END_S)
        for process in self.processes:
            if process.returncode is None:
                process.kill()
        self._wait(KILLED_S)

    def _tell(self, process: subprocess.Popen, word: str) -> None:
        with suppress(BrokenPipeError):  # it has ended
            process.stdin.write(f"{word}\n".encode())
            process.stdin.flush()

    def _wait(self, patience_s: float) -> None:
        """Until every process has ended, at most ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while any(p.returncode is None for p in self.processes) and time.monotonic() < deadline:
            signal.sigtimedwait([signal.SIGCHLD], 0.1)
            ended = reap()
            for process in self.processes:
                process.returncode = ended.get(process.pid, process.returncode)


def work(folder: RunFolder, run: Mapping[str, Any], attempt: Path) -> int:
    """Start the cluster, then the command, to its end; returns its exit code. Raises Lost and Signalled."""
    resources = Resources.model_validate(
        {key: run["resources"][key] for key in Resources.model_fields if key in run["resources"]}
    )
    cluster = profile(folder.path.parent)
    try:
        nodes = allocated_nodes()
        job_id, again = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
        layout = Layout.of(nodes, resources, cluster.ray, int(job_id), int(again))
        layout = layout.at(address_towards(nodes[1]))
    except (OSError, SlurmError) as error:  # a name that is not found, a scheduler that is silent
        raise Lost("INFRA", f"the allocation's nodes cannot be told or reached: {error}") from error
    # Ray executes what it is sent: only who has this word may send.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = RayCluster(layout, resources, cluster, folder.path, attempt / "ray.log")
    try:
        ray.start()
        took = ray.wait_for_all(cluster.ray.join_within_s)
        print(f"Ray on {', '.join(nodes)}, {layout.address}, after {took:.1f} s", flush=True)
        return _command(ray, folder, run, attempt)
    finally:
        ray.end()


def _command(ray: RayCluster, folder: RunFolder, run: Mapping[str, Any], attempt: Path) -> int:
    """The run's command on the cluster that stands."""
    parent = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        signalled_when_parent_dies(signal.SIGKILL, parent)

    scratch = os.environ["TMPDIR"]
    child = subprocess.Popen(
        command_line(folder, run, attempt, scratch, profile(folder.path.parent)),
        env=environment(own_variables(folder, run, scratch)) | {"RAY_ADDRESS": ray.layout.address},
        preexec_fn=in_child,
    )
    told = False
    while True:
        caught = signal.sigtimedwait(WATCHED, 1.0)
        if caught is not None and caught.si_signo in FORWARDED:
            if caught.si_signo == signal.SIGABRT:  # a hang: the stacks of the other nodes too
                ray.write_stacks(attempt / "stacks")
            with suppress(ProcessLookupError):  # the command has ended, and its runtime is about to
                os.kill(command_pid(attempt, child.pid), caught.si_signo)
            told = True
        ended = reap()
        if child.pid in ended:
            child.returncode = own_code(ended[child.pid])
            own = child.returncode > 0 and child.returncode not in (EXIT_CONFIG, EXIT_STOPPED)
            if own or -child.returncode in CRASHES:  # as NCCL aborts, when a node is gone
                ray.check(ended, 0.0 if told else LOST_WITHIN_S)
            return child.returncode
        if not told:
            ray.check(ended)


def main(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder, with its run.json")],
) -> None:
    """Work a run's command on a Ray cluster over the nodes of this allocation."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    become_subreaper()
    folder = RunFolder(run_dir)
    attempt = folder.attempts[-1]
    try:
        code = work(folder, folder.run, attempt)
    except Signalled as error:
        code = -error.number
    except Lost as error:
        facts = {"reason": error.reason, "detail": str(error), "nodes": error.nodes}
        write_json(attempt / "reason.json", facts)
        print(f"{error.reason}: {error}", file=sys.stderr, flush=True)
        code = EXIT_JUDGED
    if code < 0:  # it ended by a signal, and so does this
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        os.kill(os.getpid(), -code)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
