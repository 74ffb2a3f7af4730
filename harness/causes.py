"""Why attempts end: the words for it, what each means for the run, what to do, and how it is told from what was said.

interrupted   something outside ended it; the next submit goes on, and on Slurm the run puts itself back into the queue
accident      infrastructure, as far as can be told; ``python -m harness.retry`` goes on
outcome       what the program did. Trying until it looks better would be choosing results: ``retry`` refuses without
              ``--force``, and a forced run is marked for the report
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["success", "interrupted", "accident", "outcome"]


@dataclass(frozen=True)
class Cause:
    """One word: what became of the run, what it means, what to do."""

    kind: Kind
    meaning: str
    advice: str


CAUSES = {
    "DONE": Cause("success", "it ended well and its product is there", "Nothing."),
    "KILLED": Cause(
        "interrupted",
        "a signal ended it or its job: cancelled, Ctrl-C, machine gone",
        "Submit again: it goes on.",
    ),
    "PREEMPTED": Cause(
        "interrupted",
        "a job of higher priority took its nodes",
        "Nothing while it is in the queue; else submit again.",
    ),
    "NODE_FAIL": Cause(
        "interrupted",
        "its node failed",
        "Nothing while it is in the queue; else submit again, and tell the cluster's people of the node.",
    ),
    "CONFIG": Cause(
        "interrupted", "it was told something impossible; nothing was trained", "Mend it, submit."
    ),
    "BLOCKED": Cause(
        "interrupted", "what it needs did not succeed; nothing ran", "See the run it needs first."
    ),
    "TIMEOUT": Cause(
        "accident",
        "over its time limit",
        "Raise resources.time_limit in the YAML, submit (the run takes the new limit over), then `python -m harness.retry`.",
    ),
    "INFRA": Cause(
        "accident",
        "hardware, file system or network failed under it",
        "`python -m harness.retry`; a node that fails repeatedly is avoided by itself.",
    ),
    "FAILED": Cause(
        "outcome",
        "it ended with an error of its own",
        "Read the error. A mended program is a new run: submit. The same again: `retry --force`, which is marked.",
    ),
    "OOM": Cause(
        "outcome",
        "out of memory",
        "Fewer trainer.micro_batch_rows or a shorter model.max_length, or more devices: a new run, by submit.",
    ),
    "HANG": Cause(
        "outcome",
        "no progress within the bound; every process's stack is in the attempt's stacks/",
        "Read the stacks. Where a slow phase is right, raise resources.hang_after_s in the YAML, submit, then `retry --force`.",
    ),
    "DIVERGED": Cause(
        "outcome",
        "the loss, the gradient or what a step left stopped being a number",
        "A result of this system and seed; the analysis counts it. A lower optimizer.lr is another experiment.",
    ),
    "EVERYTHING_DROPPED": Cause(
        "outcome",
        "no group survived its filters, so there was nothing left to train on",
        "See the rewards and rollout.drop_zero_variance; the analysis counts it as it is.",
    ),
    "DATA": Cause(
        "outcome",
        "a row or picture of its data cannot be used",
        "Mend it at the place that is named, or leave it out: a new run, by submit.",
    ),
    "ENGINE": Cause(
        "outcome",
        "the engine that generates failed, and no sign says that the machine was at fault",
        "Read the engine's last words. Trying the same again is `retry --force`, which is marked.",
    ),
    "WORKER_DIED": Cause(
        "outcome",
        "a process of the run died, and no sign says that the machine was at fault",
        "Read the last words of trainer and engine. Trying the same again is `retry --force`, which is marked.",
    ),
}
JUDGED = Cause(
    "outcome",
    "a rule of the trainer's was broken, and it stopped rather than go on wrongly",
    "A defect: read the error. A mended program is a new run: submit. The same again: `retry --force`, which is marked.",
)

_OOM = re.compile(
    r"out of memory|OutOfMemory|\bMemoryError|Cannot allocate memory|oom_kill event|\bOOM Killed\b",
    re.IGNORECASE,
)
"""The last two are slurmstepd's, of a step that the kernel has killed in."""
_HARDWARE = re.compile(
    r"uncorrectable.{0,20}ECC|CUDA-capable device\(?s?\)? (is|are).{0,4}busy|no CUDA-capable device|fallen off the bus"
    r"|NVLink.{0,20}error",
    re.IGNORECASE,
)
_INFRASTRUCTURE = re.compile(
    r"No space left on device|Disk quota exceeded|Stale file handle|Input/output error|Transport endpoint"
    r"|ncclRemoteError|ncclSystemError|NCCL.{0,40}(remote process exited|system error)",
    re.IGNORECASE,
)
_PORT = re.compile(
    r"address already in use|\bEADDRINUSE\b|\bports? .{0,40}(in use|occupied|taken)|(fail\w*|unable|cannot) to bind",
    re.IGNORECASE,
)


def cause(state: str) -> Cause:
    """The cause of that name; any other word is an invariant of the trainer's."""
    return CAUSES.get(state, JUDGED)


def told_by(words: str) -> str | None:
    """OOM or INFRA where the words of an error say so, else None."""
    if is_memory(words):
        return "OOM"
    known = is_hardware(words) or is_port(words) or _INFRASTRUCTURE.search(words)
    return "INFRA" if known else None


def is_memory(words: str) -> bool:
    """True where they speak of memory that there was not."""
    return bool(_OOM.search(words))


def is_hardware(words: str) -> bool:
    """True where they name a broken device, which no program of ours can have caused."""
    return bool(_HARDWARE.search(words))


def is_port(words: str) -> bool:
    """True where a port was taken already: by chance, and never a fault of the node's."""
    return bool(_PORT.search(words))


def from_slurm(state: str, nodes: str, reason: str) -> tuple[str, str]:
    """(state, sentence) of a job that ended and whose own account is missing."""
    where = f" on {nodes}" if nodes else ""
    several = "[" in nodes or "," in nodes
    its_node = f"one of {nodes}" if several else nodes or "its node"
    return {
        "CANCELLED": ("KILLED", f"its job was cancelled{where}"),
        "TIMEOUT": ("TIMEOUT", f"Slurm ended its job at the time limit{where}"),
        "DEADLINE": ("TIMEOUT", "its job could not be done before its deadline"),
        "OUT_OF_MEMORY": ("OOM", f"its job was killed for memory{where}"),
        "NODE_FAIL": ("NODE_FAIL", f"{its_node} failed"),
        "BOOT_FAIL": ("NODE_FAIL", f"{its_node} did not start"),
        "PREEMPTED": ("PREEMPTED", f"a job of higher priority took {nodes or 'its nodes'}"),
        "FAILED": ("KILLED", f"its job failed{where} before it could write why ({reason})"),
    }.get(state, ("KILLED", f"its job is {state}{where}, and it left no word"))
