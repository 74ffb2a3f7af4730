"""Run folders whose command is a few lines of Python, for tests of what starts and watches commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness import scheduler, slurm
from harness.cores import POOL_ENV
from harness.identity import digest
from harness.queue import ask
from harness.run_folder import RunFolder, write_json
from harness.sync import default_uri, ensure_store

STAND_IN = """
import json, os, sys, time
from pathlib import Path
run, attempt, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def beat(phase, step):
    draft = run / "heartbeat.tmp"
    draft.write_text(json.dumps({"phase": phase, "step": step, "steps": steps, "time_unix": time.time()}))
    os.replace(draft, run / "heartbeat.json")
def record(step, **fields):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "attempt": attempt, "time_unix": time.time(), **fields}) + "\\n")
"""
"""What the stand-ins begin with: they keep a run's record as ``molt_core.train`` does."""

TRAIN = """
for step in range(1, steps + 1):
    record(step, wall_s=0.01, reward_mean=step / steps)
    beat("training", step)
"""


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, body, kind=..., needs=..., steps=..., resources=...) -> RunFolder with that command."""
    scale = tmp_path / "runs" / "experiment" / "tiny"
    code = tmp_path / "code"
    code.mkdir()

    def make(
        name: str = "molt-s0-00000000",
        body: str = TRAIN,
        *,
        kind: str = "train",
        needs: tuple[str, ...] = (),
        steps: int = 3,
        **resources,
    ) -> RunFolder:
        folder = RunFolder(scale / name)
        script = tmp_path / f"{name}.py"
        script.write_text(STAND_IN + body)
        limits = {"cpus_per_node": 1, "time_limit_s": 60, "hang_after_s": 60, **resources}
        write_json(
            folder.path / "run.json",
            {
                "experiment": "experiment",
                "scale": "tiny",
                "kind": kind,
                "system": name.partition("-")[0],
                "role": "candidate",
                "seed": 0,
                "identity": f"test-{os.getpid()}-{tmp_path.name}-{name}",
                "needs": list(needs),
                "command": ["{python}", str(script), "{run}", "{attempt}", str(steps)],
                "code_path": os.path.relpath(code, folder.path),
                "resources": limits,
                "config": {"loop": {"steps": steps}},
                "fingerprints": {"code": digest({})},
            },
        )
        return folder

    return make


@pytest.fixture
def job_command():
    """The command line of a job, as the queue starts it."""
    return lambda folder: [sys.executable, "-m", "harness.job", str(folder.path)]


@pytest.fixture
def own_cores(monkeypatch, tmp_path):
    """A machine of one's own: tests do not wait for the cores that another queue holds."""
    monkeypatch.setenv(POOL_ENV, f"test-{os.getpid()}-{tmp_path.name}")


@pytest.fixture(scope="module")
def one_megatron_rank(one_rank):
    """The process group of one, and Megatron-Core's own groups taken down with it."""
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()


def put_on_path(folder: Path, monkeypatch, **scripts: str) -> None:
    """Commands that are found before the machine's own: name -> text."""
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


SBATCH = """#!/bin/sh
[ -e "$LAB/refuses" ] && { echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1; }
case "$*" in *--test-only*) exit 0 ;; esac
number=$(($(cat "$LAB/count" 2>/dev/null || echo 100) + 1))
[ -e "$LAB/lost" ] || echo $number > "$LAB/count"
cat > "$LAB/$number.sh"
env | grep ^SLURM_ > "$LAB/$number.env"
if [ ! -e "$LAB/lost" ]; then
    name=$(sed -n 's/#SBATCH --job-name=//p' "$LAB/$number.sh")
    tasks=$(grep -o 'array=0-[0-9]*' "$LAB/$number.sh" | grep -o '[0-9]*$')
    for task in $(seq 0 $tasks); do echo "${number}_$task|PENDING|Priority||10:00|N/A|$name" >> "$LAB/queued"; done
fi
echo >> "$LAB/sbatch.calls"
[ -e "$LAB/slow" ] && { rm -f "$LAB/slow" "$LAB/lost"; echo 'sbatch: error: Socket timed out on send/recv' >&2; exit 1; }
echo "$number"
"""
SQUEUE = """#!/bin/sh
echo "$@" >> "$LAB/squeue.calls"
[ -e "$LAB/down" ] && { echo "timed out" >&2; exit 1; }
cat "$LAB/queued"
"""
SCANCEL = '#!/bin/sh\necho "$@" >> "$LAB/scancel.calls"\n'
SCONTROL = """#!/bin/sh
case "$*" in *"show job"*)
    cat "$LAB/jobs" 2>/dev/null && exit
    echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
esac
echo "MaxArraySize = $(cat "$LAB/size" 2>/dev/null || echo 1001)"
"""
SACCT = "#!/bin/sh\nexit 1\n"


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder on PATH with sbatch, squeue, scancel and srun; what they saw lies beside them."""
    folder = tmp_path / "lab"
    folder.mkdir()
    scripts = {"sbatch": SBATCH, "squeue": SQUEUE, "sacct": SACCT} | {
        "scancel": SCANCEL,
        "scontrol": SCONTROL,
    }
    (folder / "queued").touch()
    put_on_path(folder, monkeypatch, **scripts)
    monkeypatch.setenv("LAB", str(folder))
    monkeypatch.setattr(scheduler, "_asked", {})
    monkeypatch.setattr(slurm, "PAUSE_S", 0.01)
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """One SQLite store for all: making it takes seconds. Tests are kept apart by the experiment's name."""
    folder = tmp_path_factory.mktemp("store")
    uri = (
        default_uri(folder)
        if "MLFLOW_TRACKING_URI" not in os.environ
        else f"sqlite:///{folder}/mlflow.db"
    )
    ensure_store(folder, uri)
    return uri


@pytest.fixture
def planned(make_run, tmp_path):
    """planned(steps=...) -> a run folder of an experiment that no other test has."""

    def make(name: str = "molt-s0-00000000", **kwargs) -> RunFolder:
        folder = make_run(name, **kwargs)
        unique = folder.path.parents[1].with_name(tmp_path.name.replace("-", "_"))
        if not unique.exists():
            folder.path.parents[1].rename(unique)
        moved = RunFolder(unique / "tiny" / name)
        if not moved.path.exists():
            folder.path.rename(moved.path)
        ask(moved.path.parent, [moved.name], [])
        return moved

    return make
