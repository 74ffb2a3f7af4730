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
from pathlib import Path
from typing import Any

WORDS = {"SECRET", "CREDENTIAL", "CREDENTIALS", "APIKEY"}
KEYS = {"API", "ACCESS", "PRIVATE", "SECRET", "AUTH"}
"""What makes a ``key`` more than the name of a field; in an environment variable any ``_KEY`` is."""
PLACES = {"PATH", "FILE", "DIR"}
ORDINARY = re.compile(
    r"(?i:empty|none|null|true|false|dummy)|\d{1,7}|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|[\[<].*[\]>]"
)
"""Values of such a name that are no secret: a switch, a number, another variable's name, a special token of a tokenizer."""
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
    parts = _parts(name)
    if parts[-1] in PLACES:
        return False
    before_key = parts[parts.index("KEY") - 1] if "KEY" in parts[1:] else ""
    a_key = bool(before_key) and (name.isupper() or before_key in KEYS) and parts[-1] != "ENV"
    return bool(WORDS & {*parts}) or parts[-1] == "TOKEN" or a_key or _is_password(name)


def _parts(name: str) -> list[str]:
    """A name's words, without numbers at its end."""
    parts = name.upper().replace("-", "_").split("_")
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts


def _is_password(name: str) -> bool:
    """Whether it is one that a person has made up, which may look like anything."""
    parts = _parts(name)
    made_up = parts[-1].endswith(("PASSWORD", "PASSWD", "PASSPHRASE")) or parts[-1] == "PASS"
    return made_up or (len(parts) > 1 and parts[-1] == "PWD")


def _says_something(name: str, value: str) -> bool:
    """Whether ``value`` is one, and no reference to where it is; of what nobody has made up also no place, phrase or switch."""
    if len(value) < 4 or re.fullmatch(r"\$\w+|\$\{[^}]*\}", value) or value.startswith(("$(", "`")):
        return False
    if _is_password(name):
        return True
    a_place = value.startswith(("~", "./", "../")) or (
        value.startswith("/") and "SECRET" not in name.upper()
    )
    return not (a_place or re.search(r"\s", value) or ORDINARY.fullmatch(value))


def known(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Value -> name, of the secrets in this process's environment. A word of its own paths is none: records must keep those."""
    given = os.environ if environment is None else environment
    paths = f"{Path.home()} {os.getcwd()}"
    return {
        value: name
        for name, value in given.items()
        if len(value) >= SHORTEST
        and (is_secret_name(name) or (name in HOOKS and value.startswith("http")))
        and not name.upper().endswith("_ID")
        and value not in paths
        and _says_something(name, value)
    }


def refused(name: str, value: str) -> bool:
    """Whether ``name: value`` of a YAML is, or has in it, a secret in clear."""
    if is_secret_name(name) and _says_something(name, value):
        return True
    for variable, assigned in [(name, value), *ASSIGNED.findall(value)]:
        if variable in HOOKS and assigned.startswith("http"):
            return True
    named = ((n, v) for n, v in ASSIGNED.findall(value) if "_" in n or n.isupper())
    return (
        any(is_secret_name(n) and _says_something(n, v) for n, v in named) or redact(value) != value
    )


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
