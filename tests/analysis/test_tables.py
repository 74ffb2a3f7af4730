"""The paper's tables: every figure is measured from runs or code, published, or not there; and says which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from analysis.load import load_experiment
from analysis.loc import count, package_root
from analysis.paper_rows import protocol_rows, speed
from analysis.tables import PAPER, build, main
from harness.spec import load
from tests.analysis.synthetic import STEP_TIME, write_experiment

ROOT = Path(__file__).parents[2]


def rows(table, system):
    return [row for row in table.rows if row[0].startswith(system)]


@pytest.fixture
def runs(tmp_path):
    """Three seeds an arm of 1.5 and 1.8 s a step and 3,200 tokens on two devices, as the throughput experiment."""
    primary = STEP_TIME.model_copy(update={"primary": True})
    folder = write_experiment(tmp_path / "made", seeds=(0, 1, 2), steps=20, endpoints=(primary,))
    (tmp_path / "runs").mkdir()
    folder.parent.rename(tmp_path / "runs" / "paper_throughput")
    return tmp_path / "runs"


def test_table_1_counts_this_repository_and_prints_the_peers_as_published(tmp_path):
    (table,) = build(["table1"], tmp_path, {})
    (ours,) = rows(table, "ours")
    assert ours[1] == f"{count(ROOT, 'molt_core', 'molt_core.train.__main__').code_lines:,}"
    assert ours[-1] == "measured from molt_core.train.__main__"
    assert [row[-1].split(",")[0] for row in table.rows if row[0] != "ours"] == ["published"] * 4


def test_table_1_counts_a_peer_from_an_unpacked_wheel(tmp_path):
    entry = tmp_path / "peer" / "molt_rl-9.data" / "purelib" / "molt" / "cli" / "train_rl_ray.py"
    entry.parent.mkdir(parents=True)
    entry.write_text("import molt.other\nx = 1\n")
    (tmp_path / "peer" / "molt_rl-9.dist-info").mkdir()
    (table,) = build(["table1"], tmp_path, {"molt": tmp_path / "peer"})
    measured, published = rows(table, "molt")
    assert measured[1] == "2" and "in molt_rl-9 from molt.cli.train_rl_ray" in measured[-1]
    assert published[1] == "about 8,600"


@pytest.mark.network
@pytest.mark.parametrize(("version", "lines"), [("0.1.6", 8083), ("0.2.1", 8691)])
def test_the_seed_systems_own_release_is_near_another_count_of_it(tmp_path, version, lines):
    """Another counter finds 8,083 and 8,691. This one also follows a module that is named by a string: 46 and 58 lines."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", tmp_path]
    result = subprocess.run([*command, f"molt-rl=={version}"], capture_output=True, text=True)
    if result.returncode and "CI" not in os.environ:  # a laptop may be offline
        pytest.skip(f"the package index cannot be reached: {result.stderr.strip()[-200:]}")
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "peer")
    found = count(package_root(tmp_path / "peer", "molt"), "molt", "molt.cli.train_rl_ray")
    by_string = found.modules["molt.trainer.vllm.vllm_worker_wrap"].code_lines
    assert found.code_lines - by_string == pytest.approx(lines, abs=10)


def test_table_2_never_fakes_a_switch(tmp_path):
    (table,) = build(["table2"], tmp_path, {})
    for switch in ("optimiser offload", "speculative decoding", "wrong context-parallel"):
        here, published = rows(table, switch)
        assert here[1:4] == ("\u2013",) * 3 and here[-1].startswith("not built: ")
        assert published[-1].startswith("published")
    assert rows(table, "prefix caching")[0][-1].startswith("built, not run here")


def test_table_2_measures_a_switch_from_its_runs(runs):
    (runs / "paper_throughput").rename(runs / "prefix_caching")
    (table,) = build(["table2"], runs, {})
    measured = rows(table, "prefix caching")[0]
    assert "INVALID" not in measured[3] and "DIFFERENT" in measured[3]
    assert 1.8 <= float(measured[1].split()[0]) <= 2.0 and "n = 3" in measured[-1]


def test_table_3_is_made_from_runs_beside_the_published_rows(runs):
    table, _ = build(["table3"], runs, {})
    (molt,), (published,) = rows(table, "molt (tiny)"), rows(table, "slime")
    experiment = load_experiment(runs / "paper_throughput" / "tiny")
    steps = [speed(run, experiment).step_s for run in experiment.finished("molt")]
    assert float(molt[1].split()[0]) == pytest.approx(sum(steps) / 3, abs=1e-3)
    assert molt[-1] == "measured on hardware not recorded, n = 3"
    assert published[1] == "109.5 ± 10.3" and published[-1] == "published, n = 3"


def test_the_identity_of_throughput_is_checked_in_every_row(runs):
    """461 x 16 x 119.4 = 880,694 and 502 x 16 x 109.5 = 879,504: both are the 880K tokens of a step."""
    table, _ = build(["table3"], runs, {})
    identities = [row[3] for row in table.rows]
    assert all("≈" in text for text in identities)
    assert identities[2:] == ["880,694 ≈ 880,000 tokens", "879,504 ≈ 880,000 tokens"]
    assert identities[0].endswith("3,200 tokens")


def test_a_broken_identity_is_marked(runs):
    """Rates that divide by the trainer's device alone, as if the engine's were free."""
    for path in runs.glob("paper_throughput/tiny/molt-s*/metrics.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records[1:]:
            record["devices"] = 1
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    table, _ = build(["table3"], runs, {})
    assert "≠ (!)" in rows(table, "molt (tiny)")[0][3]


def test_the_published_table_is_judged_by_the_same_tests(tmp_path):
    table, _ = build(["table3"], tmp_path, {})
    note = next(note for note in table.notes if note.startswith("Published step times"))
    assert "INCONCLUSIVE" in note and "gap +9.0%" in note and "p = 0.23" in note
    assert "power 16%" in note and "n = 10 a side" in note


def test_the_protocol_says_what_is_unknown_and_what_runs_here(tmp_path):
    _, lines = build(["table3"], tmp_path, {})
    by_line = {row[0]: row[1:] for row in lines.rows}
    assert by_line["prompts a step"] == ("32", "32") and by_line["samples a prompt"] == ("4", "4")
    assert by_line["learning rate"] == ("unknown", "1e-6")
    assert by_line["optimiser offload"][1] == "not built"
    assert by_line["hardware"][1] == "2 nodes of 8 cuda devices"


@pytest.mark.parametrize("name", ["prefix_caching", "table3_throughput"])
def test_the_experiments_resolve_at_both_scales(name):
    experiment = load(PAPER / f"{name}.yaml")
    assert set(experiment.scales) == {"tiny", "h100x16"}
    rollout = experiment.scales["h100x16"].config(experiment.arms[0].name, 0).rollout
    assert (rollout.groups_per_step, rollout.samples_per_prompt) == (32, 4)


def test_protocol_rows_read_the_file_and_repeat_nothing():
    definition = {
        "published": {"protocol": [{"line": "lag", "paper": 1, "key": "loop.max_staleness"}]},
        "protocol": {"loop": {"max_staleness": 3}},
    }
    assert protocol_rows(definition) == (("lag", "1", "3"),)


def test_the_command_writes_all_three_views(tmp_path, capsys):
    assert main(["--runs", str(tmp_path)]) == 0
    assert "Code size" in capsys.readouterr().out
    data = json.loads((tmp_path / "paper" / "tables.json").read_text())
    assert [t["name"] for t in data["tables"]] == ["table1", "table2", "table3", "table3-protocol"]
    text = (tmp_path / "paper" / "tables.md").read_text()
    assert text.count("## ") == 4 and "| origin |" in text
    assert (tmp_path / "paper" / "tables.tex").read_text().count(r"\begin{table}") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table4"], "the tables are table1"),
        (["table1", "--peer", "molt"], "NAME=DIR"),
        (["table1", "--peer", "trl=."], "the systems are ours"),
        (["table1", "--peer", "verl=."], "no such module"),
    ],
)
def test_what_makes_no_table_is_one_clear_line(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--runs", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
