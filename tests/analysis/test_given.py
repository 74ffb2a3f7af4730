"""Numbers that are handed over: a row is a run, and what is none is refused with what to do."""

from __future__ import annotations

import json

import pytest

from analysis.compare import main
from analysis.given import UNNAMED_RUNS, InputError, from_table, parse_margin


def table(tmp_path, text: str, name: str = "runs.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(*records: tuple) -> str:
    return "".join(",".join(map(str, record)) + "\n" for record in records)


def test_one_row_a_run_is_read_as_it_is(tmp_path):
    given = from_table(table(tmp_path, "system,seed,s\na,0,1\na,1,2\nb,0,3\n"), "system", None)
    assert given.samples == {"a": [1.0, 2.0], "b": [3.0]}
    assert given.name == "s" and given.notes == ()


STEPS = rows(
    ("system", "seed", "step", "reward"),
    *((arm, seed, step, 0.01 * step) for arm in "ab" for seed in range(3) for step in range(50)),
)
REPEATED = rows(
    ("system", "seed", "reward"),
    *((arm, seed, 0.1 * seed) for arm in "ab" for seed in range(3) for _ in range(5)),
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STEPS, "steps are no samples; give one number a run"),
        ("system,step,reward\na,1,1\na,2,2\nb,1,3\n", "steps are no samples"),
        (REPEATED, "a has several rows with seed 0; give one number a run"),
        ("system,seed,s\na,0,1\n,1,2\nb,0,3\n", "row 2 has no system"),
        ("system,seed,s\na,0,1\n' ',1,2\nb,0,3\n".replace("'", '"'), "row 2 has no system"),
        ("system,seed,s\na,0,fast\nb,0,slow\n", "no column holds numbers"),
        ("who,seed,s\na,0,1\n", "no column system; --by takes one of who, seed, s"),
    ],
)
def test_rows_that_are_no_runs_are_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        from_table(table(tmp_path, text), "system", None)


def test_a_text_as_the_value_names_its_row(tmp_path):
    path = table(tmp_path, "system,seed,s\na,0,1\na,1,fast\nb,0,3\n")
    with pytest.raises(InputError, match="row 2 has s 'fast'"):
        from_table(path, "system", "s")


def test_the_column_of_the_arm_is_no_number(tmp_path):
    path = table(tmp_path, "system,seed,s\na,0,1\nb,0,3\n")
    with pytest.raises(InputError, match="column system names the arm; --value takes one of s"):
        from_table(path, "system", "system")


def test_a_step_as_the_last_step_of_each_run_is_no_table_of_steps(tmp_path):
    path = table(tmp_path, "system,seed,step,s\na,0,90,1\na,1,100,2\nb,0,95,3\n")
    assert from_table(path, "system", None).samples["a"] == [1.0, 2.0]


def test_steps_may_be_what_is_compared(tmp_path):
    path = table(tmp_path, "system,steps\na,90\na,100\nb,95\n")
    assert from_table(path, "system", "steps").samples == {"a": [90.0, 100.0], "b": [95.0]}


def test_rows_without_a_name_of_their_run_are_said_to_be(tmp_path, capsys):
    path = table(tmp_path, "system,s\na,1\na,2\na,3\nb,2\nb,3\nb,5\n")
    assert from_table(path, "system", None).notes == (UNNAMED_RUNS,)
    assert main([str(path), "--baseline", "b", "--margin", "1", "--json"]) == 0
    assert UNNAMED_RUNS in json.loads(capsys.readouterr().out)["endpoints"][0]["cautions"]


@pytest.mark.parametrize("text", ["[1, 2, 3]", "[]", '{"a": 1}', '"a"'])
def test_json_that_is_no_table_says_what_one_is(tmp_path, text):
    with pytest.raises(InputError, match="list of objects"):
        from_table(table(tmp_path, text, "runs.json"), "system", None)


def test_a_relative_margin_is_a_share():
    assert parse_margin("10%") == (0.1, True)
    with pytest.raises(InputError, match="below 100%"):
        parse_margin("1000%")


def test_many_runs_are_compared_without_a_permutation(tmp_path, capsys):
    """math.comb(1200, 600) is larger than a float."""
    values = [1 + 0.001 * (i % 7) for i in range(600)]
    path = table(tmp_path, json.dumps({"a": values, "b": values}), "runs.json")
    assert main([str(path), "--baseline", "b", "--margin", "10%", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["endpoints"]
    assert record["p_permutation"] is None and record["n"] == 600


def test_a_spread_beyond_a_float_is_invalid_and_still_json(capsys):
    both = ["--summary", "a:1,1e308,3", "--summary", "b:1,1,3"]
    assert main([*both, "--baseline", "b", "--margin", "1", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["endpoints"]
    assert record["verdict"] == "INVALID" and record["estimate"] is None
