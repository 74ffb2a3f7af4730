"""Send runs to Slurm through submitit, find them again, stop them.

A task of an array is one run. submitit starts ``work_run`` on a node, which turns into ``python -m harness.job``: the same job
that a laptop runs. What must be done first is a dependency of Slurm's (afterok; a job whose dependency failed is cancelled
instead of waiting for ever). Job ids are kept in ``slurm.json``, so that a second submit leaves live jobs alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.avoid import avoided, steer
from harness.cluster import Cluster
from harness.expand import Run
from harness.identity import TOOLS, digest, take_snapshot
from harness.lead import lead
from harness.processes import own_environment
from harness.requeue import PROFILE
from harness.run_folder import RunFolder, read_json, write_json
from harness.sbatch import Array, Task, arrays, job_name, script
from harness.scheduler import (
    Job,
    SlurmError,
    ask_slurm,
    configuration,
    forget,
    is_busy,
    longest_times,
    look_up,
    outside_an_allocation,
    queued,
    time_limit_s,
)

TRIES, PAUSE_S = 3, 5.0
"""How often an sbatch that timed out is tried, and the first pause, which doubles."""


def planned_arrays(runs: Iterable[Run | Task], cluster: Cluster) -> list[Array]:
    """The arrays that ``runs`` become here. Raises SlurmError where the controller does not answer."""
    known = configuration() if shutil.which("scontrol") else {}  # a dry run elsewhere
    return arrays(runs, cluster, int(known.get("MaxArraySize", "1001")))


def scripts(folder: Path, runs: Iterable[Run | Task], cluster: Cluster) -> list[tuple[str, str]]:
    """(job name, batch script) of each array as it would be sent; jobs to come stand as ``<their name>``."""
    folder = folder.resolve()
    code = take_snapshot(folder.parents[1] / ".code", write=False, code=TOOLS).path
    ids, found = job_ids(folder), []
    avoid = sorted(avoided(folder, cluster).nodes)
    for array in planned_arrays(runs, cluster):
        name = job_name(array, folder, ids)
        found.append((name, _script(array, cluster, name, ids, folder, code, avoid)))
        ids |= {run.name: f"<{run.name}>" for run in array.runs}
    return found


def submit_arrays(folder: Path, runs: Iterable[Run | Task], cluster: Cluster) -> dict[str, str]:
    """Submit ``runs``, which are not live; returns run name -> job id and keeps it in slurm.json.

    Raises SlurmError where sbatch refuses; the arrays before it stay submitted, and the next submit goes on.
    """
    if lacking := unset(cluster):
        raise SlurmError(lacking[0])
    folder = folder.resolve()
    ids = job_ids(folder)
    profile = keep_profile(folder, cluster)
    # A job waits for hours: it works with what was submitted, not with what has been edited since.
    code = take_snapshot(folder.parents[1] / ".code", code=TOOLS).path
    with outside_an_allocation():
        avoid = sorted(steer(folder, cluster).nodes)
        for array in planned_arrays(runs, cluster):
            name = job_name(array, folder, ids)
            text = _script(array, cluster, name, ids, folder, code, avoid)
            tasks = [folder / run.name for run in array.runs]
            job_id = send(text, name, tasks, folder / "slurm", profile)
            ids |= {run.name: f"{job_id}_{task}" for task, run in enumerate(array.runs)}
            write_json(folder / "slurm.json", ids)  # after each array: a later failure loses none
    forget()
    return ids


def keep_profile(folder: Path, cluster: Cluster) -> Path:
    """Where the jobs of this submit read their profile: a copy under the hash of its content, which nobody changes.

    ``cluster.json`` is the newest, for a retry.
    """
    content = cluster.model_dump(mode="json")
    path = folder / "profiles" / f"{digest(content)[:16]}.json"
    if not path.exists():
        write_json(path, content)
    write_json(folder / "cluster.json", content)
    return path


def _script(
    array: Array,
    cluster: Cluster,
    name: str,
    ids: dict[str, str],
    folder: Path,
    code: Path,
    avoid: Sequence[str],
) -> str:
    pending = [need for need in array.needs if RunFolder(folder / need).done is None]
    after = {need: ids[need] for need in pending}
    # In each array's own text, and not in the profile that the jobs read: another shape's lead is another.
    limit_s = cluster.job_s(array.resources.time_limit_s)
    ahead = lead(folder, array.resources, cluster.warn_s, limit_s)
    said = f"# USR2 comes {ahead.seconds} s before the end: {ahead.words}"
    cluster = cluster.model_copy(update={"warn_s": ahead.seconds, "setup": (said, *cluster.setup)})
    return script(array, cluster, name, after, code, folder / "slurm", avoid)


def send(text: str, name: str, run_dirs: Sequence[Path], logs: Path, profile: Path) -> str:
    """sbatch ``text``, and lay down what its tasks will find; returns the job id. Raises SlurmError.

    ``profile``: the file of the profile that they work with.

    submitit's protocol: a task unpickles a call and makes it. The pickles are written first and moved to the job's id
    afterwards (a task that is faster waits for its own), so nothing is in the queue that has nothing to do.
    """
    from submitit.core.utils import DelayedSubmission, JobPaths

    logs.mkdir(parents=True, exist_ok=True)
    calls = [logs / f"{uuid.uuid4().hex}.pkl" for _ in run_dirs]
    for call, run_dir in zip(calls, run_dirs):
        DelayedSubmission(work_run, str(run_dir), str(profile)).dump(call)
    try:
        job_id = _sbatch(text, name)
    except SlurmError:
        for call in calls:
            call.unlink()
        raise
    for task, call in enumerate(calls):
        JobPaths(logs, job_id=f"{job_id}_{task}").move_temporary_file(call, "submitted_pickle")
    (logs / f"{job_id}.sh").write_text(text)
    return job_id


def _sbatch(text: str, name: str) -> str:
    """The id of the one job of that name, however often it takes. Raises SlurmError."""
    pause, last = PAUSE_S, None
    if found := _named(name, fresh=False, living=True):
        return found  # of a submit that was interrupted between sbatch and its note of the id
    for _ in range(TRIES):
        try:
            return ask_slurm("sbatch", "--parsable", input=text).strip().partition(";")[0]
        except SlurmError as error:
            if not is_busy(error):
                raise
            last = error
        time.sleep(pause)
        pause *= 2
        if found := _named(name, fresh=True):  # it had arrived after all
            return found
    raise SlurmError(f"{last}; tried {TRIES} times. Nothing of {name} is queued; submit again")


def _named(name: str, fresh: bool, living: bool = False) -> str | None:
    """The array of that name. Raises SlurmError: where nobody answers, sending again could send twice."""
    found = {
        job_id.partition("_")[0]
        for job_id, job in queued(fresh).items()
        if job.name == name and (job.lives or not living)
    }
    return min(found, default=None)


def hopeless(folder: Path, runs: Sequence[Run | Task], alive: set[str]) -> dict[str, str]:
    """Of ``runs``, which are to be sent: name -> the run it needs that is neither done, nor live, nor sent too."""
    coming, found = {*(run.name for run in runs), *alive}, {}
    for run in runs:
        for need in run.needs:
            if need not in coming and RunFolder(folder / need).done is None:
                found[run.name] = need
                coming.discard(run.name)
    return found


def work_run(run_dir: str, profile: str) -> None:
    """One task of an array, on its first node: this process becomes the run's job, and gets Slurm's signals."""
    arguments = [sys.executable, "-m", "harness.job", run_dir]
    # From here on a signal that comes too early waits: what is blocked and what is pending outlives exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    os.execve(sys.executable, arguments, {**own_environment(), PROFILE: profile})


def job_ids(scale_folder: Path) -> dict[str, str]:
    """Run name -> id of the job that was last submitted for it."""
    return read_json(scale_folder / "slurm.json") or {}


def jobs(scale_folder: Path, fresh: bool = False) -> dict[str, Job]:
    """Run name -> its job, for runs whose job Slurm knows. Raises SlurmError, and then nothing is known."""
    ids = job_ids(scale_folder)
    known = look_up(ids.values(), fresh)
    return {name: known[job_id] for name, job_id in ids.items() if job_id in known}


def live(scale_folder: Path, fresh: bool = False) -> set[str]:
    """Names of runs whose job waits or works. Raises SlurmError."""
    return {name for name, job in jobs(scale_folder, fresh).items() if job.lives}


def cancel_jobs(scale_folder: Path, names: Iterable[str]) -> list[str]:
    """One scancel for all of ``names`` that live; returns them."""
    ids, alive = job_ids(scale_folder), live(scale_folder, fresh=True)
    stopped = [name for name in names if name in alive]
    if stopped:
        ask_slurm("scancel", *(ids[name] for name in stopped))
        forget()
    return stopped


def refusal(text: str) -> str:
    """What Slurm says to a script without queueing it: "" where it would take it, else why not.

    Raises SlurmError where it does not answer, which says nothing of the script.
    """
    kept = (line for line in text.splitlines() if not line.startswith("#SBATCH --dependency"))
    try:
        with outside_an_allocation():
            ask_slurm("sbatch", "--test-only", input="\n".join(kept) + "\n")
    except SlurmError as error:
        if is_busy(error):
            raise
        return str(error)
    return ""


def endless(text: str) -> str:
    """Why Slurm would take this script and never start it, "" where it would: by default it lets an impossible limit wait."""
    set_ = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
    )
    asked, longest = time_limit_s(set_.get("time", "")), longest_times(set_.get("partition"))
    if (
        asked is None
        or not longest
        or any(most is None or asked <= most for most in longest.values())
    ):
        return ""
    bounds = ", ".join(f"{name} allows {most / 3600:g} h" for name, most in longest.items())
    return (
        f"the time limit of {asked / 3600:g} h is over the partition's: {bounds}; the job would wait for ever, where "
        "`time_limit` of the cluster's profile would have the run go on in its next job"
    )


def unset(cluster: Cluster) -> list[str]:
    """Variables that the profile names for the jobs and this shell has not set, a sentence each."""
    return [
        f"environment.{name}: the profile gives its name alone, and this shell has not set it; `export {name}=...` first"
        for name in cluster.passed
        if name not in os.environ
    ]


def refusals(folder: Path, runs: Sequence[Run], cluster: Cluster) -> list[str]:
    """What would be refused of ``runs``: by Slurm partition, account, quality of service, more than a node has.

    Raises SlurmError where Slurm does not answer.
    """
    if lacking := unset(cluster):
        return lacking
    found: dict[str, str] = {}
    for _, text in scripts(folder, runs, cluster):
        if (said := refusal(text) or endless(text)) and said not in found:
            found[said] = ", ".join(
                line.removeprefix("#SBATCH --") for line in text.splitlines() if _matters(line)
            )
    return [
        f"{said}. Asked was {asked}; mend the cluster's profile or the scale's resources"
        for said, asked in found.items()
    ]


def _matters(line: str) -> bool:
    """A directive that says where, or how much."""
    beside = ("job-name", "output", "open-mode", "signal", "wckey", "requeue", "dependency", "kill")
    return line.startswith("#SBATCH --") and not line[10:].startswith(beside)
