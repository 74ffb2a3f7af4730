"""The list of recorded fields is the one that the documentation shows."""

from pathlib import Path

import molt_core
from molt_core.fields import FIELDS


def test_the_documentation_has_every_field_with_the_same_words_for_when():
    text = (Path(molt_core.__file__).parent / "README.md").read_text()
    _, _, table = text.partition("## The record of a step")
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    assert all(len(row) == 7 for row in rows)
    assert {row[1].strip(" `"): row[4].strip() for row in rows} == FIELDS
