"""One node of a run's Ray cluster:  python -m harness.ray_node RUN_DIR LAYOUT      (harness.ray_cluster starts them)

Runs once on every node of the allocation. Ray's files lie in a folder of this job on this node, its ports follow from the job's
number, and whatever it has started ends with it. It is told what to do in words, on its standard input: ``stacks``, the
processes here write theirs; ``end``, or nothing more to come since whoever spoke is gone. Signals would not do: at SIGTERM
srun kills, and any other it may hand to every process of the step.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cluster import RaySettings
from harness.command import environment, inside, own_variables
from harness.experiment_file import Resources
from harness.processes import (
    MARK,
    become_subreaper,
    dump_stacks,
    end_descendants,
    end_leftovers,
    reap,
    signalled_when_parent_dies,
)
from harness.requeue import profile
from harness.run_folder import RunFolder

WATCHED = (
    *(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
PORTS = (
    *("port", "node-manager-port", "object-manager-port", "runtime-env-agent-port"),
    *("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port"),
    "ray-client-server-port",
)
"""``ray start``'s options for what a node listens on; Ray's workers take ports that the kernel gives them."""
HEAD_ONLY = ("port", "ray-client-server-port")
STACKS, END = "stacks", "end"
"""What a node is told."""
LAST_PORT = 32767
"""Above are the ports that the kernel gives away."""
BESIDE, AGAIN = 211, 101
"""Blocks between the nodes of a job, and between its starts. So jobs whose numbers are less than a hundred apart share none,
however many nodes each has (up to seven), also where one was started again."""
GRACE_S = 1.0


@dataclass(frozen=True)
class Layout:
    """What every node of a cluster is told. ``nodes``: Slurm's names, the head first. ``first_port``: of each node's block."""

    nodes: tuple[str, ...]
    first_port: tuple[int, ...]
    cpus: int
    gpus: int
    object_store_bytes: int | None
    head: str = ""

    @classmethod
    def of(
        cls,
        nodes: Sequence[str],
        resources: Resources,
        settings: RaySettings,
        job_id: int,
        restarts: int = 0,
    ) -> Layout:
        """Jobs of successive numbers have blocks of ports beside each other, the nodes of a job far from each other.

        A job that is started again has others than before, one of which may have been taken.
        """
        blocks = (LAST_PORT + 1 - settings.port_base) // len(PORTS)
        first = job_id + AGAIN * restarts
        numbers = [(first + BESIDE * place) % blocks for place in range(len(nodes))]
        ports = tuple(settings.port_base + number * len(PORTS) for number in numbers)
        gb = settings.object_store_gb
        gpus = resources.devices_per_node if resources.device == "cuda" else 0
        store = None if gb is None else int(gb * 1e9)
        return cls(tuple(nodes), ports, resources.cpus_per_node, gpus, store)

    def at(self, head: str) -> Layout:
        """The same with the head's address."""
        return replace(self, head=head)

    @property
    def port(self) -> int:
        return self.first_port[0]

    @property
    def address(self) -> str:
        return f"{self.head}:{self.port}"

    def ports(self, name: str) -> dict[str, int]:
        """``ray start``'s option -> what the node ``name`` listens on."""
        place = self.nodes.index(name)
        numbers = {option: self.first_port[place] + n for n, option in enumerate(PORTS)}
        return {o: port for o, port in numbers.items() if place == 0 or o not in HEAD_ONLY}

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Layout:
        said = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items()})


def start_command(
    layout: Layout, name: str, own_address: str, scratch: Path, python: str
) -> list[str]:
    """``ray start`` for the node ``name``. Pure."""
    place = layout.nodes.index(name)
    options = {
        **layout.ports(name),
        "node-name": name,
        "node-ip-address": own_address,
        "num-cpus": layout.cpus,
        "num-gpus": layout.gpus,
        "temp-dir": scratch,
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    if layout.object_store_bytes is not None:
        options["object-store-memory"] = layout.object_store_bytes
    role = ["--head", "--include-dashboard=false", "--no-monitor"]
    return [
        *(python, "-m", "ray.scripts.scripts", "start", "--block"),
        *(role if place == 0 else [f"--address={layout.address}"]),
        *(f"--{option}={value}" for option, value in options.items()),
        *("--disable-usage-stats", "--log-color=false"),
    ]


def address_towards(host: str) -> str:
    """This machine's own address on the way to ``host``. Its own name may mean a loopback address here; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def taken(ports: Iterable[int]) -> list[int]:
    """Those of ``ports`` on which something listens here. Ray does not say so: it waits, and gives up without the reason."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that rests is free
            try:
                probe.bind(("", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                found.append(port)
    return found


def main(
    run_dir: Annotated[Path, typer.Argument(help="the run's folder")],
    layout_json: Annotated[str, typer.Argument(help="what harness.ray_cluster tells every node")],
) -> None:
    """Be one node of a run's Ray cluster until it ends, or until this is told to end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    become_subreaper()
    layout, folder = Layout.load(layout_json), RunFolder(run_dir)
    name = os.environ["SLURMD_NODENAME"]
    is_head = name == layout.nodes[0]
    if not_free := taken(layout.ports(name).values()):
        numbers = ", ".join(map(str, not_free))
        print(f"{name}: ports in use already: {numbers}; see ray.port_base of the profile")
        raise typer.Exit(1)
    if not is_head:  # on the head's node the job has looked already
        end_leftovers(os.environ[MARK])
    # The head's files lie in the job's own folder, the others' in one of this node: socket paths below it must be short.
    scratch = Path(os.environ["TMPDIR"] if is_head else tempfile.mkdtemp(prefix="m"))
    own = layout.head if is_head else address_towards(layout.head)
    run, attempt = folder.run, folder.attempts[-1]
    place = None if is_head else name
    variables = environment(own_variables(folder, run, str(scratch), place))
    variables["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    if run.get("image"):
        cluster = profile(folder.path.parent)
        line = start_command(layout, name, own, scratch, cluster.container.python)
        line = inside(folder, run, attempt, str(scratch), cluster, line, place)
    else:
        line = start_command(layout, name, own, scratch, sys.executable)
    parent = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        signalled_when_parent_dies(signal.SIGTERM, parent)

    try:
        child = subprocess.Popen(
            line,
            env=variables,
            stdin=subprocess.DEVNULL,
            preexec_fn=in_child,
        )
        threading.Thread(target=_listen, daemon=True).start()
        code = _until_told(child, Path(variables["MOLT_STACKS"]))
    finally:
        end_descendants(GRACE_S)
        if not is_head:
            end_leftovers(os.environ[MARK], GRACE_S)  # what a step of Slurm's own holds here
            shutil.rmtree(scratch, ignore_errors=True)
    raise typer.Exit(code)


def _listen() -> None:
    """Turn what is said on standard input into signals to this process, which waits for those."""
    for line in sys.stdin:
        if line.strip() == STACKS:
            os.kill(os.getpid(), signal.SIGUSR1)
        elif line.strip() == END:
            break
    os.kill(os.getpid(), signal.SIGUSR2)


def _until_told(child: subprocess.Popen, stacks: Path) -> int:
    """Wait for Ray's end, exit code 1, or for a signal to end, exit code 0."""
    while True:
        caught = signal.sigwaitinfo(WATCHED)
        ended = reap()
        if child.pid in ended:
            child.returncode = ended[child.pid]
            return 1
        if caught.si_signo == signal.SIGUSR1:
            dump_stacks(stacks, os.environ[MARK])
        elif caught.si_signo != signal.SIGCHLD:
            return 0


if __name__ == "__main__":
    typer.run(main)
