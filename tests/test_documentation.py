"""What the documentation names exists: every ``file::name`` and every relative link."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["AGENTS.md", "README.md", "molt_core/README.md"]


def names(file: Path) -> set[str]:
    """Functions, classes, and ``Class.method`` of a Python file."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if hasattr(inner, "name")}
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_function_that_is_named_with_its_file_is_there(document):
    base = (ROOT / document).parent
    missing = [
        f"{file}::{name}"
        for file, name in re.findall(r"`([\w./]+\.py)::([\w.]+)`", (ROOT / document).read_text())
        if not (base / file).is_file() or name not in names(base / file)
    ]
    assert missing == []


def test_the_way_of_a_sample_names_its_functions():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(re.findall(r"`[\w/]+\.py::[\w.]+`", text)) >= 25


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_relative_link_leads_somewhere(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text())
    assert [link for link in links if not ((ROOT / document).parent / link).exists()] == []
