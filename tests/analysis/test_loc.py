"""Code lines counted by hand in a package written for it."""

from __future__ import annotations

import ast
import json

import pytest

from analysis.loc import count, main, size

FILES = {
    "pkg/__init__.py": '"""Docstring."""\n',
    "pkg/entry.py": '''"""What it does."""
from typing import TYPE_CHECKING

from pkg.near import f  # 2 code lines so far
from . import sibling

if TYPE_CHECKING:
    from pkg import typed


def run():
    """Two lines
    of docstring."""
    # a comment
    import pkg.lazy

    return "pkg.plugin:Class"
''',
    "pkg/near.py": "def f(): return 1\n",
    "pkg/sibling.py": "from .deep.inner import x\n\n\ny = (\n    x\n)\n",
    "pkg/deep/__init__.py": "z = 1\n",
    "pkg/deep/inner.py": "from ..near import f\nx = 2\n",
    "pkg/lazy.py": "a = 1\nb = 2\n",
    "pkg/plugin.py": "class Class:\n    pass\n",
    "pkg/typed.py": "t = 1\n" * 50,
    "pkg/unreached.py": "u = 1\n" * 50,
    "other/thing.py": "o = 1\n" * 50,
}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_graph_follows_functions_and_names_and_not_type_checking(root):
    found = count(root, "pkg", "pkg.entry")
    assert set(found.modules) == {
        "pkg", "pkg.entry", "pkg.near", "pkg.sibling", "pkg.deep", "pkg.deep.inner", "pkg.lazy", "pkg.plugin",
    }  # fmt: skip


def test_the_lines_are_those_counted_by_hand(root):
    found = count(root, "pkg", "pkg.entry")
    lines = {name: module.code_lines for name, module in found.modules.items()}
    assert lines == {
        "pkg": 0, "pkg.entry": 8, "pkg.near": 1, "pkg.sibling": 4, "pkg.deep": 1, "pkg.deep.inner": 2, "pkg.lazy": 2,
        "pkg.plugin": 2,
    }  # fmt: skip
    assert (found.code_lines, found.files) == (20, 8)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1  # why\n", 1),
        ("\n# why\n\n", 0),
        ('x = 1\n"""documents x\n\nat length"""\n', 1),
        ('x = """kept\n\ntext"""\n', 2),
        ('def f(): "doc"; return 1\n', 1),
        ("x = [\n    1,  # one\n    # nothing\n    2,\n]\n", 4),
    ],
)
def test_a_line_counts_where_it_holds_code(source, lines):
    assert size(source, ast.parse(source)).code_lines == lines


def test_a_form_feed_ends_no_line():
    source = 'x = 1\n\x0cy = """a\x0cb"""\n'
    assert size(source, ast.parse(source)).code_lines == 2


@pytest.mark.parametrize(
    ("guard", "reached"),
    [
        ("if not TYPE_CHECKING:\n    import pkg.lazy\nelse:\n    import pkg.typed\n", {"pkg.lazy"}),
        ("if TYPE_CHECKING:\n    import pkg.typed\nelse:\n    import pkg.lazy\n", {"pkg.lazy"}),
        ("import typing\nif typing.TYPE_CHECKING:\n    import pkg.typed\n", set()),
        ("if MY_TYPE_CHECKING:\n    import pkg.lazy\n", {"pkg.lazy"}),
        ('if mode == "TYPE_CHECKING":\n    import pkg.lazy\n', {"pkg.lazy"}),
    ],
)
def test_only_what_never_runs_is_left_out(root, guard, reached):
    (root / "pkg" / "entry.py").write_text(guard)
    assert set(count(root, "pkg", "pkg.entry").modules) == {"pkg", "pkg.entry", *reached}


@pytest.mark.parametrize(
    "source",
    [b"\xef\xbb\xbfx = 1\n", b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", b"x = 1\r\n# why\r\n"],
)
def test_a_source_is_read_in_the_encoding_it_names(root, source):
    (root / "pkg" / "entry.py").write_bytes(source)
    assert count(root, "pkg", "pkg.entry").code_lines == 1


@pytest.mark.parametrize("source", [b"print 'x'\n", b"x = '\xe9'\n", b"x = 1\x00\n"])
def test_a_source_that_cannot_be_read_is_one_clear_line(root, capsys, source):
    (root / "pkg" / "entry.py").write_bytes(source)
    assert main(["pkg", "pkg.entry", "--root", str(root)]) == 1
    error = capsys.readouterr().err
    assert "entry.py: no source that this Python can read" in error and error.count("\n") == 1


def test_an_absent_entry_is_one_clear_line(root, capsys):
    assert main(["pkg", "pkg.nothing", "--root", str(root)]) == 1
    assert "pkg.nothing: no such module" in capsys.readouterr().err


def test_json_has_the_documented_keys(root, capsys):
    assert main(["pkg", "pkg.entry", "--root", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["code_lines"] == 20 and found["files"] == 8 and found["tokens"] > 20
    assert "docstrings" in found["exclusions"][0]


def test_this_repositorys_rl_path_is_the_default(capsys):
    assert main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entry"] == "molt_core.train.__main__"
    assert "molt_core.loop" in found["modules"] and "molt_core.train.fsdp2" in found["modules"]
    assert found["code_lines"] < 6934  # the smallest published peer
