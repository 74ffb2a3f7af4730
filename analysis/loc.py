"""Count the code that a training run can reach: the import graph of an entry point, by Python's own parser.

    python -m analysis.loc                                               this repository's RL path
    python -m analysis.loc --root PEER PACKAGE ENTRY_MODULE [--json]     any checkout or unpacked wheel

Nothing is imported or run. Imports inside functions are followed, and string constants that name a module of the package
(plug-ins are loaded by name). A line counts where it holds code: blank lines, comments and docstrings (any statement that
is only a string) do not.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXCLUSIONS = (
    "blank lines, comments, docstrings",
    "imports under `if TYPE_CHECKING`",
    "modules of other packages",
    "modules that the entry point does not reach",
)
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    """Code lines and Python tokens."""

    code_lines: int
    tokens: int


@dataclass(frozen=True)
class Count:
    """What an entry point reaches. ``modules``: dotted name -> its size."""

    package: str
    entry: str
    code_lines: int
    files: int
    tokens: int
    modules: dict[str, Size]
    exclusions: tuple[str, ...] = EXCLUSIONS


def count(root: str | Path, package: str, entry: str) -> Count:
    """Count the modules of ``package`` under ``root`` that ``entry`` reaches.

    Raises ValueError for an absent entry or a file that cannot be read.
    """
    root = Path(root)
    if module_file(root, entry) is None:
        raise ValueError(f"{entry}: no such module under {root}")
    modules: dict[str, Size] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        path = module_file(root, name)
        if path is None or name in modules:
            continue
        source, tree = parse(path)
        modules[name] = size(source, tree)
        is_package = path.name == "__init__.py"
        for target in (name, *imported(tree, name, is_package)):
            if target.split(".")[0] == package:
                waiting += ancestors(target)
    return Count(
        package=package,
        entry=entry,
        code_lines=sum(module.code_lines for module in modules.values()),
        files=len(modules),
        tokens=sum(module.tokens for module in modules.values()),
        modules=dict(sorted(modules.items())),
    )


def parse(path: Path) -> tuple[str, ast.Module]:
    """Source and tree of a file, in the encoding that its mark or its first lines name. Raises ValueError with the file."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        return source, ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: no source that this Python can read: {error}") from error


def package_root(folder: Path, package: str) -> Path:
    """Where a package lies in a checkout or in an unpacked wheel, which may keep it under ``NAME.data/purelib``."""
    inside = sorted(folder.glob("*.data/purelib"))
    if not (folder / package).is_dir() and inside and (inside[0] / package).is_dir():
        return inside[0]
    return folder


def module_file(root: Path, name: str) -> Path | None:
    """The file of a dotted module name, None where it is not a module under ``root``."""
    path = root.joinpath(*name.split("."))
    for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def ancestors(name: str) -> list[str]:
    """a.b.c -> [a, a.b, a.b.c]: importing a module imports the packages around it."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def imported(tree: ast.Module, name: str, is_package: bool) -> Iterator[str]:
    """Dotted names that a module may import: statements at any depth, and strings that look like a module path."""
    for node in _walk_runtime(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") if is_package else name.split(".")[:-1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.fullmatch(r"(\w+(?:\.\w+)+)(?::\w+)?", node.value)
            if match:
                yield match[1]


def size(source: str, tree: ast.Module) -> Size:
    """Code lines and tokens of a file."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    tokens = 0
    text = source.split("\n")  # as the tokenizer does: a form feed ends no line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in NOT_CODE or token.start in docstrings:
            continue
        tokens += 1
        span = range(token.start[0], token.end[0] + 1)
        lines.update(line for line in span if text[line - 1].strip())
    return Size(code_lines=len(lines), tokens=tokens)


def _walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but what stands under ``if TYPE_CHECKING``, or in the else of ``if not TYPE_CHECKING``: it never runs."""
    yield node
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        children: list[ast.AST] = list(node.orelse)
    elif (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.UnaryOp)
        and isinstance(node.test.op, ast.Not)
        and _is_type_checking(node.test.operand)
    ):
        children = list(node.body)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _walk_runtime(child)


def _is_type_checking(test: ast.expr) -> bool:
    """``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``, and nothing else that only holds the word."""
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def main(arguments: list[str] | None = None) -> int:
    """Print the count; returns 1 where the entry module is absent."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.loc", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("package", nargs="?", default="molt_core")
    parser.add_argument(
        "entry", nargs="?", help="module to start from (default: PACKAGE.train.__main__)"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="folder that holds the package (default: this repository)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        found = count(
            package_root(options.root, options.package),
            options.package,
            options.entry or f"{options.package}.train.__main__",
        )
    except ValueError as error:
        print(f"analysis.loc: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(asdict(found), indent=2))
        return 0
    table = Table(title=f"Reached from {found.entry}", title_justify="left")
    table.add_column("module")
    table.add_column("code lines", justify="right")
    for name, module in found.modules.items():
        table.add_row(name, f"{module.code_lines:,}")
    table.add_section()
    table.add_row(f"{found.files} files, {found.tokens:,} tokens", f"{found.code_lines:,}")
    table.caption = "Not counted: " + "; ".join(EXCLUSIONS)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
