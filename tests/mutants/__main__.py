"""Plant the faults and demand that the tests notice:  python -m tests.mutants [NAME ...]

For each: the named tests pass on the tree as it is, and fail on a copy with the fault. Exit status 1 where one survives.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.runner import ROOT, MutantError, mutants, run_tests, survives


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant; all where none is named")
    names = parser.parse_args().names
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    unknown = set(names) - {mutant.name for mutant in chosen}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    survived = 0
    for mutant in chosen:
        started = time.monotonic()
        print(f"{mutant.name}: {mutant.fault} (invariant {mutant.invariant})", flush=True)
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            try:
                before = run_tests(ROOT, mutant.tests)
                wrong = [f"{t} {o} without it" for t, o in before.items() if o != "passed"]
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
