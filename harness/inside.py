"""The first process of a run inside its container:  python -P inside.py RUN_DIR ATTEMPT COMMAND...

It notes down what can be known only here: the packages of the image, and its own process id. Then it becomes the command, with
the same id and the same environment, and ends when the runtime that started it does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the path is the command's

from harness import fingerprints  # noqa: E402
from harness.processes import signalled_when_parent_dies  # noqa: E402
from harness.run_folder import RunFolder, edit_json, write_json  # noqa: E402


def main(run_dir: str, attempt_name: str, *command: str) -> None:
    signalled_when_parent_dies(signal.SIGKILL, os.getppid())
    folder = RunFolder(Path(run_dir))
    attempt = folder.path / "attempts" / attempt_name
    installed = fingerprints.packages()
    with edit_json(attempt / "start.json") as start:
        start["packages"] = installed
        start["fingerprints"]["packages"] = fingerprints.packages_hash(installed)
        folder.update_run(fingerprints=start["fingerprints"])
    own = {"pid": os.getpid(), "pid_namespace": os.readlink("/proc/self/ns/pid")}
    write_json(attempt / "inside.json", own)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
