"""Stand-ins for apptainer and for pyxis' srun, which make a real container with bubblewrap from the options they are given.

    python runtimes.py BIN apptainer|srun ARGUMENTS     BIN: where bwrap and the real srun are

An unknown option of a container is an error, as it is to the real ones.

An image is a text file that names the folders it consists of. Nothing of the machine is in the container but those, /proc, /dev
and what is mounted by the options. Stricter than apptainer, which mounts /tmp by itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BIN = Path(sys.argv[1])


def bubblewrap(image: str, mounts: list[str], workdir: str, command: list[str]) -> list[str]:
    """``command`` in a container of ``image``; ``mounts``: SOURCE:TARGET[:ro]."""
    made = [str(BIN / "bwrap"), "--proc", "/proc", "--dev-bind", "/dev", "/dev"]
    for place in Path(image).read_text().split():
        made += ["--ro-bind", place, place]
    for name in ("bin", "lib", "lib64"):
        made += ["--symlink", f"usr/{name}", f"/{name}"]
    for mount in mounts:
        source, target, *flags = mount.split(":")
        made += ["--ro-bind" if flags == ["ro"] else "--bind", source, target]
    return [*made, "--chdir", workdir, *command]


def apptainer(arguments: list[str]) -> list[str]:
    mounts, workdir = [], "/"
    assert arguments.pop(0) == "exec"
    while arguments[0].startswith("--"):
        match arguments.pop(0):
            case "--nv" | "--no-home":
                pass
            case "--bind":
                mounts.append(arguments.pop(0))
            case "--pwd":
                workdir = arguments.pop(0)
            case other:
                sys.exit(f"apptainer: unknown flag: {other}")
    image, *command = arguments
    return bubblewrap(image, mounts, workdir, command)


def srun(arguments: list[str]) -> list[str]:
    """The real srun with the options that are its own, and the command in a container where one is asked for."""
    own, asked = [], {}
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        key, _, value = option.partition("=")
        if "container" in key:
            asked[key] = value
        else:
            own.append(option)
    if image := asked.pop("--container-image", None):
        mounts = asked.pop("--container-mounts", "").split(",")
        workdir = asked.pop("--container-workdir", "/")
        asked.pop("--container-env", None)  # over the image's own, of which there are none here
        for flag in ("mount-home", "entrypoint", "remap-root"):
            asked.pop(f"--no-container-{flag}", None)
        if asked:
            sys.exit(f"srun: unrecognized option '{next(iter(asked))}'")
        arguments = bubblewrap(image, mounts, workdir, arguments)
    return [str(BIN / "srun"), *own, *arguments]


if __name__ == "__main__":
    made = {"apptainer": apptainer, "srun": srun}[sys.argv[2]](sys.argv[3:])
    os.execv(made[0], made)
