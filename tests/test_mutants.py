"""One fault of each kind is caught here; ``make mutants`` plants them all, and all must still apply."""

import psutil
import pytest

from tests.harness.test_job import until
from tests.mutants import __main__ as command_line
from tests.mutants import runner
from tests.mutants.runner import ROOT, Mutant, MutantError, mutants, plant, read, survives

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.always], ids=lambda m: m.name)
def test_the_tests_notice_the_fault(mutant: Mutant, tmp_path):
    assert survives(mutant, tmp_path) == []


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.always], ids=lambda m: m.name)
def test_a_fault_that_is_planted_on_request_still_applies(mutant: Mutant, tmp_path):
    plant(mutant, tmp_path)


def test_every_test_that_a_fault_names_is_there():
    named = {test.partition("[")[0] for mutant in MUTANTS for test in mutant.tests}
    where = [(test.partition("::")[0], test.rpartition("::")[2]) for test in named]
    missing = [name for file, name in where if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_a_patch_that_no_longer_applies_says_so(tmp_path):
    patch = tmp_path / "old.patch"
    patch.write_text(
        "Invariant: 1\nFault: f\nTests: t\n\n--- a/molt_core/types.py\n+++ b/molt_core/types.py\n"
        "@@ -1,1 +1,1 @@\n-this line was never there\n+nor this\n"
    )
    with pytest.raises(MutantError, match=r"old\.patch no longer applies"):
        plant(read(patch), tmp_path)


def test_a_fault_that_no_test_notices_is_reported(tmp_path):
    patch = tmp_path / "harmless.patch"
    patch.write_text(
        "Invariant: none\nFault: a comment\nTests: tests/molt_core/test_contract.py::"
        "test_a_trajectory_of_prompt_only_has_no_action\n\n--- /dev/null\n+++ b/molt_core/harmless.py\n"
        "@@ -0,0 +1,1 @@\n+# nothing\n"
    )
    (line,) = survives(read(patch), tmp_path)
    assert line.endswith("test_a_trajectory_of_prompt_only_has_no_action passed")


SLOW = """
import subprocess, sys
def test_slow():
    subprocess.run([sys.executable, "-c", "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"])
"""


def test_tests_that_do_not_end_are_ended_with_all_that_they_started(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TIMEOUT_S", 5)
    monkeypatch.setattr(runner, "_check_imports", lambda *_: None)
    (tmp_path / "test_slow.py").write_text(SLOW)
    with pytest.raises(MutantError, match="no end within 5 s"):
        runner.run_tests(tmp_path, ["test_slow.py::test_slow"])
    child = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(child))


def test_faults_that_cannot_be_planted_are_one_line(monkeypatch, capsys):
    def broken(*_):
        raise MutantError("pytest could not run")

    monkeypatch.setattr(command_line, "run_tests", broken)
    assert command_line.main([MUTANTS[0].name]) == 2
    assert "no fault was planted: pytest could not run" in capsys.readouterr().err


def test_faults_that_no_time_is_left_for_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(
        command_line, "run_tests", lambda tree, tests: dict.fromkeys(tests, "passed")
    )
    monkeypatch.setattr(command_line, "survives", lambda mutant, folder: [])
    assert command_line.main(["--within", "0"]) == 0
    assert f"{len(MUTANTS)} were not planted: 0 s were over" in capsys.readouterr().out
