"""Secrets stay out of every file: one rule for what is one, one function that takes it out of what is recorded.

A token is never written into a YAML. A cluster's profile names the variable without a value, and the job finds the value of
the shell that submitted:

    environment: {HF_TOKEN: , NCCL_DEBUG: WARN}

``refused`` finds what was written all the same, in every YAML that is read (``harness/source.py``). ``redact`` is applied to
every record before it is written (``run_folder.write_json``), from which MLflow, ``why`` and notices are made: an error may
repeat what it was given. A run's own ``output.log`` is what its program printed, byte for byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

WORDS = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "APIKEY"}
KEYS = {"API", "ACCESS", "PRIVATE", "SECRET", "AUTH"}
"""What makes a ``key`` more than the name of a field; in an environment variable any ``_KEY`` is."""
PLACES = {"PATH", "FILE", "DIR"}
HOOKS = {"MOLT_NOTIFY"}
"""Variables whose URL lets anybody who has it write."""
SHORTEST = 8
"""Characters of a value that is looked for wherever it stands; a shorter one would be found in ordinary words."""
SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
USER_OF_URL = re.compile(r"(?<=://)(?:[^/\s@:$]*:[^/\s@$]+|[^/\s@:$]{16,})(?=@)")
ASSIGNED = re.compile(r"\b([A-Za-z]\w*)=[\"']?([^\s\"']+)")
"""NAME=value in a line of shell or an option."""


def is_secret_name(name: str) -> bool:
    """Whether a key or a variable of this name holds a secret."""
    parts = name.upper().replace("-", "_").split("_")
    if parts[-1] in PLACES:
        return False
    before_key = parts[parts.index("KEY") - 1] if "KEY" in parts[1:] else ""
    a_key = bool(before_key) and (name.isupper() or before_key in KEYS)
    return bool(WORDS & {*parts}) or a_key


def _says_something(value: str) -> bool:
    """A value and no place, reference or phrase."""
    return len(value) >= 4 and not re.search(r"^[/~.$<]|\s", value)


def known(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Value -> name, of the secrets in this process's environment."""
    given = os.environ if environment is None else environment
    return {
        value: name
        for name, value in given.items()
        if len(value) >= SHORTEST
        and (is_secret_name(name) or (name in HOOKS and value.startswith("http")))
        and _says_something(value)
    }


def refused(name: str, value: str) -> bool:
    """Whether ``name: value`` of a YAML is, or has in it, a secret in clear."""
    if name in HOOKS and value.startswith("http"):
        return True
    if is_secret_name(name) and _says_something(value):
        return True
    if any(is_secret_name(n) and _says_something(v) for n, v in ASSIGNED.findall(value)):
        return True
    return redact(value) != value


def redact(value: Any) -> Any:
    """``value``, a text or nested lists and mappings, with ``[NAME]`` in the place of secrets. Numbers stay as they are."""
    return _redact(value, known())


def _redact(value: Any, secrets: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for secret in sorted(secrets, key=len, reverse=True):
            value = value.replace(secret, f"[{secrets[secret]}]")
        return USER_OF_URL.sub("[user]", SHAPES.sub("[secret]", value))
    if isinstance(value, dict):
        return {_redact(key, secrets): _redact(inner, secrets) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(inner, secrets) for inner in value]
    return value
