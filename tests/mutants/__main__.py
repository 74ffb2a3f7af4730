"""Plant the faults and demand that the tests notice:  python -m tests.mutants [NAME ...] [--within SECONDS]

The named tests pass on the tree as it is, and each fails on a copy with its fault. Exit status 1 where a fault survives, 2
where none could be planted.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.mutants.runner import ROOT, Mutant, MutantError, mutants, run_tests, survives


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant; all where none is named")
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="begin no further fault after that time; they come in random order, and how many were left out is said",
    )
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in mutants() if not options.names or mutant.name in options.names]
    unknown = set(options.names) - {mutant.name for mutant in chosen}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if options.within is not None:
        random.shuffle(chosen)
    started = time.monotonic()
    sound: dict[str, str] = {}
    planted = survived = 0
    for mutant in chosen:
        if options.within is not None and time.monotonic() - started > options.within:
            break
        try:
            untried = [test for test in mutant.tests if test not in sound]
            sound |= run_tests(ROOT, untried) if untried else {}
        except MutantError as error:
            print(f"no fault was planted: {error}", file=sys.stderr)
            return 2
        planted += 1
        survived += not _is_caught(mutant, sound)
    print(f"{planted - survived} of {planted} faults caught")
    if planted < len(chosen):
        print(f"{len(chosen) - planted} were not planted: {options.within:.0f} s were over")
    return 1 if survived else 0


def _is_caught(mutant: Mutant, sound: Mapping[str, str]) -> bool:
    """Plant one fault and say what became of it. ``sound``: its tests' outcomes without it."""
    started = time.monotonic()
    print(f"{mutant.name}: {mutant.fault} (invariant {mutant.invariant})", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        try:
            wrong = [f"{t} {sound[t]} without it" for t in mutant.tests if sound[t] != "passed"]
            wrong += survives(mutant, Path(folder))
        except MutantError as error:
            wrong = [str(error)]
    verdict = f"NOT CAUGHT: {'; '.join(wrong)}" if wrong else "caught"
    print(f"    {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
