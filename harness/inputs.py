"""What a run reads beyond the project's code: rows, plug-ins, agents, trainers, a published model's weights.

They lie where their owner may edit them, so each is hashed at submit (the hashes are part of the run's identity) and compared
when an attempt starts: a run never goes on with other files than those it was submitted with.

    found = protocol_inputs(config, Places(base))     # at submit
    changed(run["inputs"])                            # at start: "" or the file that is another one now
"""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from harness.identity import CODE, MIB, ROOT, digest, hash_path
from molt_core.config import RunConfig

WEIGHTS = ("model.path", "algorithm.teacher", "critic.path")
"""Keys that name the folder of a published model."""
WHOLE_UP_TO = 64 * MIB
"""Largest file of a published model that is hashed byte by byte."""
INSTALLED = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
STANDARD = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}


@dataclass(frozen=True)
class Input:
    """One thing that ``key`` of the configuration names.

    files: path -> sha256 of what it consists of, empty where it is not there. import_path: folders that its modules were found
    in, which a run needs to find them too.
    """

    key: str
    name: str
    files: Mapping[str, str]
    hash: str | None
    import_path: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Its part of run.json."""
        return {"key": self.key, "name": self.name, "files": dict(self.files)}


@dataclass(frozen=True)
class Places:
    """Where the paths of a protocol lie: below ``base``, or, written ``$NAME/...``, below what the cluster's profile calls so.

    So the same experiment, with the same identities, finds its model and data on another cluster.
    """

    base: Path
    named: Mapping[str, str] = field(default_factory=dict)

    def at(self, path: str) -> Path:
        """The absolute path. Raises ValueError where the profile has no such name."""
        if not path.startswith("$"):
            return (self.base / path).resolve()
        name, _, below = path[1:].partition("/")
        if name not in self.named:
            there = ", ".join(self.named) or "none"
            raise ValueError(
                f"{path}: the cluster's profile has no place called {name} under `paths` (it has {there}); add it there, or "
                "choose the profile by --cluster or MOLT_CLUSTER"
            )
        return Path(self.named[name], below).resolve()

    def find(self, path: str) -> Path | None:
        """The absolute path of what is there; None where it is not, or its name is unknown."""
        if path.startswith("$") and path[1:].partition("/")[0] not in self.named:
            return None
        found = self.at(path)
        return found if found.exists() else None


def protocol_inputs(config: RunConfig, places: Places) -> tuple[Input, ...]:
    """What the protocol names, hashed."""
    found = [
        _at(f"algorithm.plugins[{n}]", p, places) for n, p in enumerate(config.algorithm.plugins)
    ]
    if looks_like_path(config.task.source):
        found.append(_at("task.source", config.task.source, places))
    for key, name in weights_folders(config).items():
        if name is not None and (folder := places.find(name)) is not None and folder.is_dir():
            found.append(_at(key, name, places))
    return (*found, *_module("task.agent", config.task.agent))


def weights_folders(config: RunConfig) -> dict[str, str | None]:
    """What each of ``WEIGHTS`` says."""
    critic = None if config.critic is None else config.critic.path
    return dict(zip(WEIGHTS, (config.model.path, config.algorithm.teacher, critic)))


def trainer_inputs(config: RunConfig) -> tuple[Input, ...]:
    """What an arm's trainer names beyond this project."""
    return tuple(_module("trainer.backend", config.trainer.backend))


def hashes(inputs: Iterable[Input]) -> dict[str, str | None]:
    """Name -> hash: their part of an identity. None for what is not there: a plan can be shown before its data has come."""
    return {found.name: found.hash for found in inputs}


def import_path(inputs: Iterable[Input]) -> list[str]:
    return list(dict.fromkeys(folder for found in inputs for folder in found.import_path))


def changed(recorded: Iterable[Mapping[str, Any]]) -> str:
    """Which file is another one than at submit, as a sentence; "" where none is. ``recorded``: ``Input.record`` of each."""
    for item in recorded:
        for name, before in item["files"].items():
            path = Path(name)
            if not path.exists():
                return f"{item['key']}: {path} was there at submit and is gone; put it back or submit again"
            if _hash(path, item["key"]) != before:
                return (
                    f"{item['key']}: {path} changed after the submit; put it back or submit again"
                )
    return ""


def looks_like_path(source: str) -> bool:
    """A file or folder of rows, rather than the name of a built-in task."""
    return "/" in source or source.startswith("$") or Path(source).suffix in (".jsonl", ".parquet")


def _at(key: str, name: str, places: Places) -> Input:
    path = places.find(name)
    if path is None:
        return Input(key, name, {}, None)
    content = _hash(path, key)
    return Input(key, name, {str(path): content}, content)


def _hash(path: Path, key: str) -> str:
    return hash_path(path, WHOLE_UP_TO if key in WEIGHTS else None)


def _module(key: str, name: str) -> list[Input]:
    """A class of somebody's own module, with every file of theirs that it can import; [] for a built-in name."""
    module, separator, _ = name.partition(":")
    if not separator or _in_snapshot(module):
        return []
    files, folders = module_files(module)
    by_name = {relative: hash_path(path) for relative, path in sorted(files.items())}
    by_path = {str(files[relative]): content for relative, content in by_name.items()}
    content = digest(by_name) if by_name else None
    return [Input(key, name, by_path, content, tuple(sorted(folders)))]


def module_files(start: str) -> tuple[dict[str, Path], set[str]]:
    """({name: file}, {folders they are found in}) of module ``start`` and what it imports, without running any of it.

    Of a package every file counts, its data too; of a module outside any package the file. What is imported is followed as long
    as it lies outside the installed packages, the standard library and this project's snapshot, which have fingerprints of
    their own; ``start`` counts wherever it is installed.
    """
    files: dict[str, Path] = {}
    folders: set[str] = set()
    waiting, seen = [start], set()
    while waiting:
        module = waiting.pop()
        owner = _owner(module)
        if module in seen or owner is None or _elsewhere(module, but_installed=module == start):
            continue
        seen.add(module)
        home, folder = owner
        here = _files_below(home) if home.is_dir() else [home]
        new = {str(file.relative_to(folder)): file for file in here}
        folders.add(str(folder))
        for name in new.keys() - files.keys():
            if new[name].suffix == ".py":
                waiting += _imports(new[name], _dotted(name))
        files |= new
    return files, folders


def _owner(module: str) -> tuple[Path, Path] | None:
    """(the outermost package's folder, or the file of a module in none; the folder on the import path that it was found in).

    None where there is no such module, or none in a file.
    """
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = find_module(".".join(parts[:depth]))
        if spec is None:
            return None
        if spec.origin is not None:  # else a folder of modules without __init__.py
            origin = Path(spec.origin)
            home = origin.parent if spec.submodule_search_locations else origin
            return (home, home.parents[depth - 1]) if origin.is_file() else None
    return None


def find_module(name: str) -> ModuleSpec | None:
    """Where ``name`` would be imported from. Unlike importlib's own search this runs no package's ``__init__``."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", list(spec.submodule_search_locations))
    return spec


def _imports(file: Path, module: str) -> Iterator[str]:
    """Names of what ``file`` may import, wherever in it the import stands."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # it cannot be imported itself, so it imports nothing
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - max(node.level - 1, 0)]
            origin = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from (
                name for name in (origin, *(f"{origin}.{a.name}" for a in node.names)) if name
            )


def _dotted(relative: str) -> str:
    path = Path(relative).with_suffix("")
    return ".".join(path.parent.parts if path.name == "__init__" else path.parts)


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        if path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in inside):
            yield path


def _elsewhere(module: str, but_installed: bool) -> bool:
    """True where another fingerprint covers the module."""
    origin = _origin(module)
    if origin is None or any(origin.is_relative_to(folder) for folder in INSTALLED):
        return origin is None or not but_installed
    return _in_snapshot(module) or any(origin.is_relative_to(folder) for folder in STANDARD)


def _in_snapshot(module: str) -> bool:
    origin = _origin(module)
    return origin is not None and any(origin.is_relative_to(ROOT / entry) for entry in CODE)


def _origin(module: str) -> Path | None:
    spec = find_module(module)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
