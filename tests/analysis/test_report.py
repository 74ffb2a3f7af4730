"""The report is one page without outside assets, the same in Markdown, and a JSON whose keys do not move."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from analysis.plan import Plan, freeze
from analysis.report import main, write_report
from tests.analysis.synthetic import ACCURACY, write_experiment

README = Path(__file__).parents[2] / "analysis" / "README.md"


def documented(section: str) -> list[str]:
    """The keys that analysis/README.md lists under a heading: the first column of its table."""
    text = README.read_text().split(f"### {section}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def written(sound, tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    shutil.copytree(sound.parent.parent, root, dirs_exist_ok=True)
    assert main(["moe_vl", "--runs", str(root)]) == 0
    return root / "moe_vl" / "tiny" / "report"


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ("report.json", lambda report: report),
        ("arms[]", lambda report: report["arms"][0]),
        ("endpoints[]", lambda report: report["endpoints"][0]),
        ("checks[]", lambda report: report["checks"][0]),
        ("noise_floor[]", lambda report: report["noise_floor"][0]),
        ("runs[]", lambda report: report["runs"][0]),
    ],
)
def test_the_keys_of_report_json_are_the_documented_ones(written, section, part):
    report = json.loads((written / "report.json").read_text())
    assert list(part(report)) == documented(section)


def test_the_accounting_adds_up(tmp_path):
    folder = write_experiment(
        tmp_path, steps=20, lost={("molt", 3): "out of memory"}, absent=(("megatron", 4),)
    )
    molt, megatron = write_report(folder)["arms"]
    counts = ("planned", "started", "finished", "lost")
    assert [molt[key] for key in counts] == [5, 5, 4, 1]
    assert [megatron[key] for key in counts] == [5, 4, 4, 1]
    assert molt["lost_runs"][0]["reason"] == "out of memory"
    page = (folder / "report" / "report.html").read_text()
    assert "seed 3: out of memory" in page


def test_the_page_needs_nothing_from_outside(written):
    page = (written / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page and "@import" not in page and "url(http" not in page


def test_the_page_shows_what_a_reader_must_see(written):
    page = (written / "report.html").read_text()
    for text in (
        "Does an FSDP2 trainer learn as well",
        "EQUIVALENT",
        "within ±0.03 accuracy",
        "optimizer",
        "trainer.backend",
        "May not",
        "same distribution",
        "Not amended",
    ):
        assert text in page
    assert (
        page.count("<svg") >= 11
    )  # forest, 3 distributions, timeline, 2 curves, parts, mismatch, 3 power


def test_markdown_and_json_agree(written):
    report = json.loads((written / "report.json").read_text())
    text = (written / "report.md").read_text()
    for endpoint in report["endpoints"]:
        assert f"**{endpoint['headline']}**" in text
        assert endpoint["may_write"] in text


@pytest.mark.parametrize("view", ["report.md", "report.html"])
def test_the_report_says_that_a_claim_of_equivalence_is_not_corrected(written, view):
    assert "each claim of equivalence stands alone" in (written / view).read_text()


def test_two_reports_of_the_same_runs_draw_the_same_figures(written):
    def figures():
        page = (written / "report.html").read_text()
        return re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)

    first = figures()
    write_report(written.parent)
    assert figures() == first


def test_an_invalid_endpoint_shows_no_numbers(tmp_path):
    def unmeasured(system, seed, record):
        record.pop("mismatch_p99", None)

    folder = write_experiment(tmp_path, steps=20, edit_record=unmeasured)
    for endpoint in write_report(folder)["endpoints"]:
        assert endpoint["verdict"] == "INVALID"
        assert endpoint["estimate"] is None and endpoint["ci_low"] is None
        assert "mismatch_p99 was never recorded" in endpoint["reasons"][0]


def test_an_amendment_is_shown_with_what_was_done_by_then(tmp_path):
    folder = write_experiment(tmp_path, steps=20)
    plan = Plan.load(folder / "plan.json")
    wider = ACCURACY.model_copy(update={"margin": 0.05})
    freeze(
        plan.model_copy(update={"endpoints": (wider, *plan.endpoints[1:])}), folder / "plan.json"
    )
    write_report(folder)
    page = (folder / "report" / "report.html").read_text()
    assert "with 11 runs done" in page and "0.03 → 0.05" in page


def test_nothing_finished_yet_is_a_report_too(tmp_path):
    everything = {(system, seed): "killed" for system in ("molt", "megatron") for seed in range(3)}
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, lost=everything)
    report = write_report(folder)
    assert {endpoint["verdict"] for endpoint in report["endpoints"]} == {"INVALID"}


def test_runs_that_never_started_are_a_report_too(tmp_path):
    everyone = tuple((system, seed) for system in ("molt", "megatron") for seed in range(3))
    report = write_report(write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, absent=everyone))
    assert [arm["started"] for arm in report["arms"]] == [0, 0]


@pytest.mark.parametrize("records", [None, '{"step": 1, "eval_reward_stderr": null}\n'])
def test_a_finished_run_without_its_numbers_is_a_report_too(tmp_path, records):
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20)
    metrics = next(folder.glob("molt-s1-*/metrics.jsonl"))
    metrics.unlink()
    if records:
        metrics.write_text(records)
    report = write_report(folder)
    assert {endpoint["verdict"] for endpoint in report["endpoints"]} == {"INVALID"}


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path, capsys):
    odd = ACCURACY.model_copy(update={"name": "pass|fail [/] rate"})
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, endpoints=(odd,))
    assert main(["moe_vl", "--runs", str(tmp_path)]) == 0
    assert "pass|fail [/]" in capsys.readouterr().out
    text = (folder / "report" / "report.md").read_text()
    rows = [line for line in text.split("\n") if line.startswith("| pass\\|") and "primary" in line]
    assert len(rows) == 1 and len(re.split(r"(?<!\\)\|", rows[0])) == 10  # eight cells, two ends


def test_names_with_markup_or_dollar_signs_are_text_on_the_page(tmp_path):
    odd = ACCURACY.model_copy(
        update={"name": '"><script>alert(1)</script> $a$', "unit": "$/x$ <b>"}
    )
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=20, endpoints=(odd,))
    write_report(folder)
    page = (folder / "report" / "report.html").read_text()
    assert "<script" not in page and "<b>\n" not in page
    assert page.count("&lt;script&gt;") >= 5 and "$/x$ &lt;b&gt;" in page


def test_several_scales_with_a_plan_ask_which(sound, tmp_path, capsys):
    for scale in ("cluster", "gpu"):
        (tmp_path / "moe_vl" / scale).mkdir(parents=True)
        shutil.copy(sound / "plan.json", tmp_path / "moe_vl" / scale)
    assert main(["moe_vl", "--runs", str(tmp_path)]) == 1
    assert "say --scale cluster or gpu" in capsys.readouterr().err


def test_an_experiment_without_a_plan_is_one_clear_line(tmp_path, capsys):
    assert main(["nothing", "--runs", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "plan.json: no frozen plan" in error and "Traceback" not in error


def test_the_command_prints_json_for_machines(written, capsys):
    assert main(["moe_vl", "--runs", str(written.parents[2]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experiment"] == "moe_vl"
