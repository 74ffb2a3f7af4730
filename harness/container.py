"""The command of a run inside its container, as pure functions. Which: the key ``container`` of the cluster's profile.

The job stays outside, where Slurm's commands are: it is signalled, watches, requeues. Inside works what it starts. So the
batch script is the same for every runtime, and the launch line is one of

    apptainer exec --nv ... IMAGE env VARIABLES python inside.py RUN ATTEMPT COMMAND
    srun ... --container-image=IMAGE ... env VARIABLES python inside.py RUN ATTEMPT COMMAND      (pyxis)

``inside.py`` notes down what can be known only there, its process id among it, and becomes the command: the job signals
that process itself, and not a runtime that may pass a signal on, to one process or to all.

Every place that a run is known to need is mounted as itself: all runs with their code, what the protocol names, scratch.
The user's home is not there, whose packages would come before the image's; what else of the host is, apptainer's and the
site's settings say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster import Container
from harness.identity import ROOT, hash_path
from harness.inputs import INSTALLED
from harness.run_folder import edit_json, read_json


@dataclass(frozen=True)
class Image:
    """An image file and its sha256, which is part of the identity of every run in it."""

    path: str
    sha256: str


def known_image(container: Container, runs: Path, write: bool = True) -> Image | None:
    """The profile's image, None where it has none. Raises ValueError where its file is not there.

    Tens of gigabytes are not read again and again: ``runs/.images.json`` remembers the hash of a file with that size, inode and
    times of change, of which the kernel's own cannot be set.
    """
    if container.runtime == "none":
        return None
    path = Path(str(container.image))
    if not path.is_file():
        raise ValueError(f"container.image: {path} is no file here; see containers/README.md")
    found = path.stat()
    facts = {
        f"st_{key}": getattr(found, f"st_{key}") for key in ("size", "ino", "mtime_ns", "ctime_ns")
    }
    cache = runs / ".images.json"
    known = (read_json(cache) or {}).get(str(path), {})
    if known.items() >= facts.items():
        return Image(str(path), known["sha256"])
    image = Image(str(path), hash_path(path))
    if write:
        with edit_json(cache) as images:
            images[str(path)] = {**facts, "sha256": image.sha256}
    return image


def other_image(run: Mapping[str, Any], container: Container, runs: Path) -> str:
    """Why a run cannot start in the profile's image, as a sentence; "" where it can. ``run``: run.json."""
    recorded = run.get("image")
    try:
        here = known_image(container, runs) if recorded else None
    except ValueError as error:
        return str(error)
    if recorded and here is None:
        return "it was submitted with an image, and its job's profile has none"
    if recorded and here and here.sha256 != recorded["sha256"]:
        return f"container.image: {here.path} changed after the submit; put it back or submit again"
    return ""


def launch(
    container: Container,
    command: Sequence[str],
    *,
    mounts: Sequence[str] = (),
    workdir: str = "/",
    variables: Mapping[str, str] | None = None,
    passed: Sequence[str] = (),
    cpus: int = 1,
    node: str | None = None,
) -> list[str]:
    """``command`` in a container on this node, which is the allocation's first, or ``node``.

    mounts: SOURCE[:TARGET[:ro]] each. passed: variables that go in with the value that they have outside, which no command
    line may show; apptainer passes all by itself, and pyxis those that the image does not set.
    """
    mounts = [_whole(mount) for mount in dict.fromkeys((*container.mounts, *mounts))]
    inner = [*command]
    if variables:
        # By `env`, since under pyxis a variable of the image's own wins over the job's.
        inner = ["env", *(f"{key}={value}" for key, value in variables.items()), *inner]
    image = str(container.image)
    match container.runtime:
        case "none":
            return inner
        case "apptainer":
            binds = [part for mount in mounts for part in ("--bind", mount)]
            own = ["apptainer", "exec", "--nv", "--no-home", *binds, "--pwd", workdir]
            return [*own, *container.arguments, image, *inner]
        case "pyxis":
            # A step of one task beside whatever else runs here, with all of the job's memory, processors and devices.
            where = "--relative=0" if node is None else f"--nodelist={node}"
            step = ["srun", "--nodes=1", "--ntasks=1", where, "--overlap", "--mem=0"]
            step += [f"--cpus-per-task={cpus}", "--cpu-bind=none", f"--container-image={image}"]
            step += [f"--container-mounts={','.join(mounts)}"] if mounts else []
            step += [f"--container-workdir={workdir}", "--no-container-mount-home"]
            step += ["--no-container-entrypoint", "--no-container-remap-root"]
            step += [f"--container-env={','.join(passed)}"] if passed else []
            return [*step, *container.arguments, *inner]


def _whole(mount: str) -> str:
    """SOURCE:TARGET[:ro]. Raises ValueError where a runtime would read the place as several."""
    source, *rest = mount.split(":")
    if "," in mount or len(rest) > 2 or (len(rest) == 2 and rest[1] != "ro"):
        raise ValueError(f"{mount} cannot be mounted; a place with , or : in its name has to move")
    return ":".join([source, *(rest or [source])])


def needed_mounts(runs: Path, run: Mapping[str, Any], scratch: str, code: Path = ROOT) -> list[str]:
    """What a run reads and writes outside its image: all runs and their code, the harness's, its inputs, ``scratch``.

    ``run``: run.json, of which ``inputs`` and ``import_path`` count.
    """
    modules = [Path(place) for place in import_path(run)]
    files = [Path(name) for item in run.get("inputs", []) for name in item["files"]]
    files = [file for file in files if not any(file.is_relative_to(m) for m in modules)]
    outside = [place for place in (code, *modules, *files) if not place.is_relative_to(runs)]
    return [str(runs), scratch, *(f"{place}:{place}:ro" for place in dict.fromkeys(outside))]


def import_path(run: Mapping[str, Any]) -> list[str]:
    """Folders of a run's own modules; what is installed outside belongs into the image."""
    return [place for place in run.get("import_path", []) if Path(place) not in INSTALLED]


def command_pid(attempt: Path, started: int) -> int:
    """Whom to signal: the command inside where its process id means the same here, else the process that was ``started``."""
    inside = read_json(attempt / "inside.json") or {}
    same = inside.get("pid_namespace") == os.readlink("/proc/self/ns/pid")
    return inside["pid"] if same else started


def own_code(code: int) -> int:
    """The exit code of the command, of a runtime's: 128 + n is how they say that signal n ended it."""
    return 128 - code if 128 < code <= 192 else code
