"""Plant the faults and demand that the tests notice:  python -m tests.mutants [NAME ...]

The named tests pass on the tree as it is, and each fails on a copy with its fault. Exit status 1 where a fault survives, 2
where none could be planted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.runner import ROOT, MutantError, mutants, run_tests, survives


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant; all where none is named")
    names = parser.parse_args(arguments).names
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    unknown = set(names) - {mutant.name for mutant in chosen}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    print("the tests as they are", flush=True)
    try:
        sound = run_tests(ROOT, sorted({test for mutant in chosen for test in mutant.tests}))
    except MutantError as error:
        print(f"no fault was planted: {error}", file=sys.stderr)
        return 2
    survived = 0
    for mutant in chosen:
        started = time.monotonic()
        print(f"{mutant.name}: {mutant.fault} (invariant {mutant.invariant})", flush=True)
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            try:
                wrong = [f"{t} {sound[t]} without it" for t in mutant.tests if sound[t] != "passed"]
                wrong += survives(mutant, Path(folder))
            except MutantError as error:
                wrong = [str(error)]
        survived += bool(wrong)
        verdict = f"NOT CAUGHT: {'; '.join(wrong)}" if wrong else "caught"
        print(f"    {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
