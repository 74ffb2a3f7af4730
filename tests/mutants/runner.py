"""Copy the tree, plant one fault, run the tests that must fail.

The tests run in the copy, with the copy first on PYTHONPATH for them and for every process they start, so that the editable
install of the true tree is not what they import; that is checked each time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("molt_core", "harness", "analysis")
NOT_COPIED = shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "mlruns")
TIMEOUT_S = 600


class MutantError(RuntimeError):
    """A fault that cannot be planted or judged; the message names the patch."""


@dataclass(frozen=True)
class Mutant:
    """One planted fault. ``tests`` are pytest ids, each of which must fail; ``always``: planted in ``make test`` too."""

    path: Path
    invariant: str
    fault: str
    tests: tuple[str, ...]
    always: bool

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> Mutant:
    """Parse a patch's header. Raises MutantError that names what is missing."""
    header, separator, _ = path.read_text().partition("\n--- ")
    fields = dict(line.split(": ", 1) for line in header.splitlines() if ": " in line)
    absent = [key for key in ("Invariant", "Fault", "Tests") if key not in fields]
    if absent or not separator:
        raise MutantError(f"{path.name}: the header lacks {', '.join(absent) or 'a unified diff'}")
    tests = tuple(fields["Tests"].split())
    return Mutant(path, fields["Invariant"], fields["Fault"], tests, fields.get("Run") == "always")


def mutants() -> list[Mutant]:
    return [read(path) for path in sorted(Path(__file__).parent.glob("*.patch"))]


def plant(mutant: Mutant, folder: Path) -> Path:
    """A copy of the tree in ``folder`` with the fault in it. Raises MutantError where the patch no longer applies."""
    copy = folder / "tree"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    command = ["git", "apply", "--whitespace=nowarn", str(mutant.path)]
    applied = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=_outside_git())
    if applied.returncode:
        raise MutantError(
            f"{mutant.path.name} no longer applies: {applied.stderr.strip()}; write the fault anew against today's code"
        )
    return copy


def run_tests(tree: Path, tests: Sequence[str]) -> Mapping[str, str]:
    """Outcome of each of ``tests`` in ``tree``: "passed", "failed" (an assertion or the code under test), or "error"."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    _check_imports(tree, environment)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcome.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short"]
        command += [f"--junitxml={report}", *tests]
        code, said = _run(command, tree, environment)
        if code not in (0, 1):
            raise MutantError(f"pytest could not run {' '.join(tests)}:\n{said[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = dict.fromkeys(tests, "passed")
    for case in cases:
        module = case.get("classname", "").replace(".", "/")
        test = f"{module}.py::{case.get('name', '').split('[')[0]}"
        for tag, outcome in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if case.find(tag) is not None and outcomes.get(test) != "failed":
                outcomes[test] = outcome
    return outcomes


def _run(command: Sequence[str], tree: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """(exit code, output). Whatever ends the wait, the tests and what they started end with it: the copy can be removed."""
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MutantError(f"no end within {TIMEOUT_S} s: {' '.join(command[6:])}") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, said


def survives(mutant: Mutant, folder: Path) -> list[str]:
    """What is wrong with the tests: one line for each that does not fail on the fault. Empty where all do."""
    outcomes = run_tests(plant(mutant, folder), mutant.tests)
    return [f"{test} {outcomes[test]}" for test in mutant.tests if outcomes[test] != "failed"]


def _check_imports(tree: Path, environment: Mapping[str, str]) -> None:
    code = f"import importlib.util as u; print([u.find_spec(p).origin for p in {PACKAGES}])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment, capture_output=True, text=True
    )
    origins = [str(tree / package / "__init__.py") for package in PACKAGES]
    if found.stdout.strip() != str(origins):
        raise MutantError(f"not the copy is imported but {found.stdout or found.stderr}")


def _outside_git() -> dict[str, str]:
    """git apply must not take the copy for a part of a repository around it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {"GIT_CEILING_DIRECTORIES": "/"}
