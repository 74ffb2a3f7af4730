"""A real Slurm on one machine, for tests:  python slurm/local/cluster.py start | stop | kill NODE | repair NODE

Four nodes with eight declared GPUs each, accounting, a preemptable partition, about three seconds to start. Nothing is
installed into the system: Debian's packages are unpacked below .slurm/ and started from there, so ``sbatch`` is on the PATH of
whoever reads ``.slurm/env.sh`` and of nobody else. Every daemon listens on 127.0.0.1, has its state, key and sockets below
.slurm/lab, and is ended by its own pid.

Root is needed: a node is a process-id, host-name and mount namespace, which gives it its name (``hostname`` says node1) and a
power switch (``kill`` ends slurmd and all that it started, at once).
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("SLURM_LOCAL") or HERE.parents[1] / ".slurm")
"""Where software and cluster lie; several clusters can stand side by side, each with a SLURM_LOCAL and a SLURM_LOCAL_PORT."""
LAB, ROOT, BIN = HOME / "lab", HOME / "root", HOME / "bin"
GROUPS = Path("/sys/fs/cgroup/memory")
"""Where the kernel keeps limits of memory (cgroup v1: what Slurm 22.05 does for v2 takes systemd)."""
LONGEST = 70
"""A socket's path may have 107 bytes, and slurmstepd's have up to 35 below this."""
PORT = int(os.environ.get("SLURM_LOCAL_PORT", "16800"))

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
    *("slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core", "mariadb-client-core"),
    *("libmunge2", "libmariadb3", "libaio1", "liburing2", "mariadb-common", "mysql-common"),
    *("libhwloc15", "libnuma1", "libjwt0", "libjansson4", "libfreeipmi17", "librrd8"),
    *("libipmimonitoring6", "liblz4-1", "libhttp-parser2.9", "libjson-c5", "libyaml-0-2"),
    "bubblewrap",  # what the tests' container runtimes are made of
)
"""Slurm, its database, and the libraries that a bare Debian may lack; those that apt does not know are left out."""
PROGRAMS = {
    **{
        name: f"usr/bin/{name}"
        for name in ("sbatch", "squeue", "sacct", "scancel", "sinfo", "srun")
    },
    **{name: f"usr/bin/{name}" for name in ("scontrol", "sacctmgr", "salloc", "munge", "unmunge")},
    **{name: f"usr/sbin/{name}-wlm" for name in ("slurmctld", "slurmd", "slurmstepd")},
    **{name: f"usr/sbin/{name}" for name in ("slurmdbd", "munged", "mariadbd")},
    **{name: f"usr/bin/{name}" for name in ("mariadb", "bwrap")},
}


class LocalError(RuntimeError):
    """The cluster cannot be had here; the message says why."""


# Software


def install() -> None:
    """Unpack the packages below HOME and write a starter for each program. Does nothing where that is done."""
    stamp = HOME / "installed"
    wanted = f"{' '.join(PACKAGES)} {HOME}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if shutil.which("apt-get") is None:
        raise LocalError("no apt-get here: the packages are Debian's")
    shutil.rmtree(ROOT, ignore_errors=True)
    debs = HOME / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    quiet = dict(cwd=debs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run(
        ["apt-get", "update"], **quiet
    )  # where it fails, the lists that are there may do
    known = [
        name
        for name in PACKAGES
        if subprocess.run(["apt-cache", "show", name], **quiet).returncode == 0
    ]
    if subprocess.run(["apt-get", "download", *known], **quiet).returncode:
        raise LocalError("apt-get download failed; try `apt-get update` by hand, it says why")
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", deb, ROOT], check=True)
    shutil.rmtree(debs)
    write_starters()
    stamp.write_text(wanted)


def write_starters() -> None:
    """One script a program, that starts it with the unpacked libraries and leaves the environment alone."""
    loader = next(iter(sorted(Path("/").glob("lib*/ld-linux-*.so.*"))))
    plugins = plugin_folder()
    libraries = f"{plugins}:{plugins.parent}"
    BIN.mkdir(exist_ok=True)
    for name, place in PROGRAMS.items():
        if not (ROOT / place).exists():
            raise LocalError(f"the packages have no {place}; this cluster is written for Debian 12")
        starter = BIN / name
        command = shlex.join(
            [str(loader), "--library-path", libraries, "--argv0", name, str(ROOT / place)]
        )
        starter.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        starter.chmod(0o755)


def plugin_folder() -> Path:
    return next(iter(ROOT.glob("usr/lib/*/slurm-wlm")))


# Processes


def alive(pid_file: Path) -> bool:
    """True while the process of a pid file runs. A zombie does not: some inits are slow to collect."""
    try:
        state = Path(f"/proc/{pid_file.read_text().strip()}/status").read_text()
    except FileNotFoundError:
        return False
    return "\nState:\tZ" not in state


def end(pid_file: Path, number: signal.Signals = signal.SIGTERM, patience_s: float = 10) -> None:
    """Signal the process of a pid file, wait for its end, kill it where it stays."""
    if alive(pid_file):
        pid = int(pid_file.read_text())
        os.kill(pid, number)
        if not wait_for(lambda: not alive(pid_file), patience_s):
            os.kill(pid, signal.SIGKILL)
    pid_file.unlink(missing_ok=True)


def wait_for(condition: Callable[[], bool], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def answers(*command: str | Path, **options: str) -> bool:
    """True where a client's command succeeds within three seconds."""
    try:
        return (
            subprocess.run(
                command, capture_output=True, timeout=3, env=environment() | options
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def daemon(
    name: str, command: Sequence[str | Path], up: Callable[[], bool], **variables: str
) -> None:
    """Start a daemon in the foreground of its own session and wait until it answers."""
    with open(LAB / "log" / f"{name}.out", "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment() | variables,
        )
    (LAB / "run" / f"{name}.started").write_text(str(process.pid))
    if not wait_for(up, 30):
        raise LocalError(f"{name} does not answer; see {LAB}/log/")


def environment() -> dict[str, str]:
    """This process's variables with the cluster's, and without those of an allocation."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    return {**kept, "SLURM_CONF": f"{LAB}/slurm.conf", "PATH": f"{BIN}:{os.environ['PATH']}"}


# The cluster


def start(nodes: int = 4, cpus: int = 16, memory_mb: int = 256000, gpus: int = 8) -> None:
    """Start every daemon; afterwards all nodes are idle. Raises LocalError."""
    if os.geteuid() != 0:
        raise LocalError("root is needed: each node is a namespace of its own")
    if running():
        return
    if len(str(LAB)) > LONGEST:
        raise LocalError(f"{LAB} is too long a path for sockets; set SLURM_LOCAL to a shorter one")
    install()
    for folder in ("log", "run", "state", "dev", *(f"spool/node{n + 1}" for n in range(nodes))):
        (LAB / folder).mkdir(parents=True, exist_ok=True)
    configure(nodes, cpus, memory_mb, gpus)
    start_munge()
    start_database()
    daemon("slurmctld", [BIN / "slurmctld", "-D"], lambda: answers(BIN / "scontrol", "ping"))
    for number in range(nodes):
        start_node(f"node{number + 1}")
    if not wait_for(lambda: len(idle_nodes()) == nodes, 30):
        raise LocalError(f"only {', '.join(idle_nodes()) or 'no node'} came up; see {LAB}/log/")


def running() -> bool:
    return alive(LAB / "run" / "slurmctld.started")


def configure(nodes: int, cpus: int, memory_mb: int, gpus: int) -> None:
    places = dict(
        lab=LAB, user=getpass.getuser(), plugins=plugin_folder(), nodes=nodes, cpus=cpus, gpus=gpus
    )
    ports = dict(
        controller_port=PORT,
        node_port=PORT + 1,
        database_port=PORT + 2,
        first_port=PORT + 11,
        last_port=PORT + 10 + nodes,
    )
    text = Template((HERE / "slurm.conf").read_text()).substitute(
        places, **ports, memory_mb=memory_mb, tasks="cgroup" if memory_is_limited() else "none"
    )
    (LAB / "slurm.conf").write_text(text)
    # A GPU must be a character device, or CUDA_VISIBLE_DEVICES is not set.
    for number in range(gpus):
        (LAB / "dev" / f"nvidia{number}").unlink(missing_ok=True)
        (LAB / "dev" / f"nvidia{number}").symlink_to("/dev/null")
    devices = f"{LAB}/dev/nvidia[0-{gpus - 1}]"
    (LAB / "gres.conf").write_text(
        f"NodeName=node[1-{nodes}] Name=gpu File={devices}\n" if gpus else ""
    )
    (LAB / "plugstack.conf").write_text("")
    (LAB / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={LAB}/cgroup\nConstrainRAMSpace=yes\n"
    )
    names = "".join(f"127.0.0.1 node{number + 1}\n" for number in range(nodes))
    (LAB / "hosts").write_text(Path("/etc/hosts").read_text() + names)
    exports = f'export SLURM_CONF={LAB}/slurm.conf PATH={BIN}:"$PATH" MOLT_CLUSTER=local\n'
    (HOME / "env.sh").write_text(exports)


def memory_is_limited() -> bool:
    """Whether a job that takes more memory than it asked for is killed by the kernel here, as it is on a cluster.

    The cluster's groups lie below one of its own, which Slurm sees as the root of all.
    """
    group, seen = GROUPS / f"molt-slurm-{PORT}", LAB / "cgroup" / "memory"
    try:
        group.mkdir(exist_ok=True)
    except OSError:
        return False
    seen.parent.mkdir(exist_ok=True)
    seen.unlink(missing_ok=True)
    seen.symlink_to(group)
    return True


def forget_groups() -> bool:
    """Remove the groups of memory; False while a process in one is still ending."""
    try:
        for group in sorted(GROUPS.glob(f"molt-slurm-{PORT}/**/"), reverse=True):
            group.rmdir()  # the deepest first
    except OSError:
        return False
    return True


def start_munge() -> None:
    key, socket = LAB / "munge.key", LAB / "run" / "munge.sock"
    if not key.exists():
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
    places = {
        "socket": socket,
        "pid-file": LAB / "run/munged.pid",
        "log-file": LAB / "log/munged.log",
        "seed-file": LAB / "run/munged.seed",
    }
    options = [f"--{name}={place}" for name, place in places.items()]
    daemon(
        "munged",
        [BIN / "munged", "--foreground", "--force", f"--key-file={key}", *options],
        lambda: answers(BIN / "munge", "-S", socket, "-n"),
    )


def start_database() -> None:
    """mariadb on a socket of its own, and slurmdbd, which finds that socket through a variable of libmariadb."""
    socket, data, user = LAB / "run" / "mysql.sock", LAB / "db", getpass.getuser()
    share = ROOT / "usr/share/mysql"
    common = ["--no-defaults", f"--datadir={data}", f"--user={user}", "--skip-name-resolve"]
    common += [f"--lc-messages-dir={share}", f"--character-sets-dir={share}/charsets"]
    if not (data / "mysql").is_dir():
        data.mkdir(exist_ok=True)
        names = ("system_tables", "performance_tables", "system_tables_data")
        parts = [(share / f"mysql_{name}.sql").read_text() for name in names]
        once = ["--bootstrap", "--skip-grant-tables", f"--log-error={LAB}/log/bootstrap.log"]
        subprocess.run(
            [BIN / "mariadbd", *common, *once],
            input="".join(["create database mysql;\nuse mysql;\n", *parts]),
            stderr=subprocess.DEVNULL,  # its log has it
            text=True,
            check=True,
        )
    client = [BIN / "mariadb", "--no-defaults", "-S", socket]
    fast = ["flush-log-at-trx-commit=0", "doublewrite=0"]
    fast += ["buffer-pool-size=64M", "lock-wait-timeout=900"]
    private = [f"--socket={socket}", "--skip-networking", "--skip-grant-tables"]
    private += [f"--plugin-dir={LAB}", *(f"--innodb-{setting}" for setting in fast)]
    daemon(
        "mariadbd",
        [BIN / "mariadbd", *common, *private],
        lambda: answers(*client, "-e", "select 1"),
    )
    subprocess.run([*client, "-e", "create database if not exists slurm_acct_db"], check=True)
    settings = LAB / "slurmdbd.conf"
    settings.touch(0o600)  # slurmdbd refuses one that others can read
    settings.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={LAB}/run/munge.sock\nPluginDir={plugin_folder()}\n"
        f"DbdHost=localhost\nDbdAddr=127.0.0.1\nDbdPort={PORT + 2}\nCommunicationParameters=NoInAddrAny\n"
        f"SlurmUser={user}\nPidFile={LAB}/run/slurmdbd.pid\nLogFile={LAB}/log/slurmdbd.log\n"
        f"StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser={user}\nStorageLoc=slurm_acct_db\n"
    )
    manager = [BIN / "sacctmgr", "--noheader", "--immediate"]
    daemon(
        "slurmdbd",
        [BIN / "slurmdbd", "-D"],
        lambda: answers(*manager, "list", "cluster"),
        MYSQL_UNIX_PORT=str(socket),
    )
    for what in (["cluster", "local"], ["account", "lab"], ["user", user, "account=lab"]):
        answers(*manager, "add", *what)  # says no where it is there


def start_node(name: str) -> None:
    """Switch a node on: slurmd as the first process of a namespace that knows the names of all nodes."""
    inside = f"hostname {name}; mount --bind {LAB}/hosts /etc/hosts; exec {BIN}/slurmd -D -N {name} -d {BIN}/slurmstepd"
    alone = ["unshare", "--fork", "--pid", "--mount-proc", "--uts", "--mount", "--kill-child=KILL"]
    daemon(name, [*alone, "sh", "-c", inside], lambda: True)


def idle_nodes() -> list[str]:
    listed = subprocess.run(
        [BIN / "sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
        capture_output=True, text=True, env=environment()
    )  # fmt: skip
    return sorted(set(listed.stdout.split()))


def kill_node(name: str) -> None:
    """The node loses its power: slurmd and everything below it is gone at once. ``start_node`` repairs it."""
    end(LAB / "run" / f"{name}.started", signal.SIGKILL)


def stop() -> None:
    """End the jobs, then every daemon that ``start`` started."""
    if running():
        subprocess.run(
            [BIN / "scancel", f"--user={getpass.getuser()}"], env=environment(), timeout=10
        )
        quiet = [BIN / "squeue", "--noheader"]
        wait_for(
            lambda: not subprocess.run(quiet, capture_output=True, env=environment()).stdout, 10
        )
    for pid_file in sorted((LAB / "run").glob("node*.started")):
        end(pid_file, signal.SIGKILL)
    for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        end(LAB / "run" / f"{name}.started")
    wait_for(forget_groups, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("verb", choices=("install", "start", "stop", "status", "kill", "repair"))
    parser.add_argument("node", nargs="?", help="of kill and repair")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        if arguments.verb == "start":
            start()
            print(
                f"{len(idle_nodes())} nodes idle after {time.monotonic() - began:.1f} s; use it: . {HOME}/env.sh"
            )
        elif arguments.verb == "status":
            print(f"running, idle: {', '.join(idle_nodes())}" if running() else "not running")
        elif arguments.verb in ("kill", "repair"):
            {"kill": kill_node, "repair": start_node}[arguments.verb](arguments.node)
        else:
            {"install": install, "stop": stop}[arguments.verb]()
    except LocalError as error:
        sys.exit(f"slurm-local: {error}")


if __name__ == "__main__":
    main()
