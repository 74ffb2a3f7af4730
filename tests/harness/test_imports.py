"""The modules of the harness can be read one after the other: none imports, also not later or for types, what imports it."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter

from harness.identity import ROOT


def imported(module: str) -> set[str]:
    """Modules of the harness that ``module`` imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "harness":
            found |= {f"harness.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness."):
            found.add(node.module)
    return found


def test_no_module_imports_what_imports_it():
    files = (ROOT / "harness").rglob("*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    graph = {name: imported(name) for name in names}
    order = [*TopologicalSorter(graph).static_order()]  # raises CycleError that names the circle
    assert order.index("harness.run_status") < order.index("harness.status")
