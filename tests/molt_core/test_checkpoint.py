"""Checkpoints on disk: complete or not there, torn ones passed over, the right ones kept."""

import asyncio
import json
from pathlib import Path

import pytest

from molt_core.config import CheckpointConfig
from molt_core.train.checkpoint import (
    LOOP_STATE,
    MARKER,
    CheckpointError,
    CheckpointStore,
    OtherSchema,
    Saver,
    read_checkpoint,
)


def write(store: CheckpointStore, step: int, size: int = 1000, **record):
    draft = store.draft(step)
    (draft / "trainer" / "shard").write_bytes(b"x" * size)
    return store.commit(draft, b"state", {"step": step, **record}, store.folder.parent / "policy")


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.scan()[0]]


def make_store(folder: Path, **config) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", CheckpointConfig(**config))


def test_a_checkpoint_is_found_with_its_record_and_the_policy_it_began_from(tmp_path):
    store = make_store(tmp_path)
    write(store, 7, reward_mean=0.5)
    (found,), torn = store.scan()
    assert (found.step, found.record["reward_mean"], torn) == (7, 0.5, [])
    assert (found.path / found.policy).resolve() == tmp_path / "policy"
    assert found.bytes == 1000 + len(b"state")


MARKERS = {"half a marker": b'{"schema_version": 1, "fi', "an empty object": b"{}"}
MARKERS |= {"nothing": b"null", "a list": b"[1, 2]", "no text": b"\xff\xfe\x00"}


@pytest.mark.parametrize("damage", ["no marker", *MARKERS, "short shard", "no loop state"])
def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_the_newest(tmp_path, damage):
    store = make_store(tmp_path)
    write(store, 5)
    torn = write(store, 10).path
    if damage == "no marker":
        (torn / MARKER).unlink()
    elif damage in MARKERS:
        (torn / MARKER).write_bytes(MARKERS[damage])
    elif damage == "short shard":
        (torn / "trainer" / "shard").write_bytes(b"x" * 999)
    else:
        (torn / LOOP_STATE).unlink()
    complete, problems = store.scan()
    assert [checkpoint.step for checkpoint in complete] == [5]
    assert len(problems) == 1 and "step-00000010" in problems[0]


def test_a_torn_checkpoint_is_written_again(tmp_path):
    store = make_store(tmp_path)
    (write(store, 10).path / MARKER).unlink()
    write(store, 10)
    assert steps(store) == [10]


def test_a_draft_is_no_checkpoint_and_is_cleared(tmp_path):
    store = make_store(tmp_path)
    draft = store.draft(3)
    (draft / "trainer" / "shard").write_bytes(b"x")
    assert store.scan() == ([], [])
    store.clear_drafts()
    assert list(store.folder.iterdir()) == []


def test_the_last_ones_are_kept(tmp_path):
    store = make_store(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        write(store, step)
    assert steps(store) == [3, 4]
    assert len(list(store.folder.iterdir())) == 2


@pytest.mark.parametrize("best_is, kept", [("highest", [2, 4]), ("lowest", [3, 4])])
def test_the_best_one_is_kept_besides(tmp_path, best_is, kept):
    store = make_store(tmp_path, keep_last=1, keep_best="reward_mean", best_is=best_is)
    for step, reward in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.3)):
        write(store, step, reward_mean=reward)
    assert steps(store) == kept


def test_a_checkpoint_without_the_metric_is_not_the_best_and_the_log_says_so(tmp_path, capsys):
    store = make_store(tmp_path, every_steps=5, keep_last=1, keep_best="reward_mean")
    write(store, 5, reward_mean=0.5)
    assert capsys.readouterr().out == ""
    write(store, 10)
    assert (
        "step-00000010: not kept as the best: its record has no reward_mean"
        in capsys.readouterr().out
    )
    write(store, 15)
    assert steps(store) == [5, 15]


def test_the_disk_budget_takes_the_oldest_first_and_the_best_one_last(tmp_path):
    """Each checkpoint has 1005 bytes; two fit into 2.5 kB."""
    store = make_store(tmp_path, keep_last=9, max_disk_gb=2.5e-6)
    for step in (1, 2, 3):
        write(store, step)
    assert steps(store) == [2, 3]
    best = make_store(tmp_path / "best", keep_last=9, keep_best="loss", max_disk_gb=2.5e-6)
    for step in (1, 2, 3):
        write(best, step, loss=-step if step > 1 else 9.0)
    assert steps(best) == [1, 3]


def test_the_newest_one_is_never_deleted_and_a_budget_below_it_is_an_error(tmp_path):
    store = make_store(tmp_path, max_disk_gb=2.5e-6)
    write(store, 1)
    with pytest.raises(CheckpointError, match="max_disk_gb is 2.5e-06: raise it"):
        write(store, 2, size=4000)
    assert steps(store) == [1, 2]


def test_another_schema_is_refused_and_nothing_is_begun_anew_over_it(tmp_path):
    store = make_store(tmp_path)
    path = write(store, 1).path
    facts = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps(facts | {"schema_version": 0}))
    for read in (lambda: read_checkpoint(path), store.scan):
        with pytest.raises(
            OtherSchema, match="schema version 0.*go on with the code that wrote it"
        ):
            read()


class Trainer:
    """Writes its shard when told that the disk is ready; fails where told to."""

    def __init__(self) -> None:
        self.ready, self.failure = asyncio.Event(), None

    async def begin_save(self, folder: Path) -> None:
        self.shard = folder / "shard"

    async def finish_save(self) -> None:
        await self.ready.wait()
        if self.failure:
            raise self.failure
        self.shard.write_bytes(b"x")


def test_the_loop_does_not_wait_and_its_state_is_that_of_the_beginning(tmp_path):
    async def run():
        store, trainer = make_store(tmp_path), Trainer()
        saver, state = Saver(store, trainer, tmp_path / "policy"), {"groups": [1]}
        await saver.begin(4, state)
        state["groups"].append(2)
        saver.commit({"step": 4})
        saver.check()
        assert steps(store) == []
        await asyncio.sleep(0.2)
        trainer.ready.set()
        await saver.wait()
        (checkpoint,), _ = store.scan()
        (noted,) = map(json.loads, (store.folder / "saves.jsonl").read_text().splitlines())
        assert (noted["step"], noted["bytes"]) == (4, checkpoint.bytes)
        assert noted["save_s"] >= 0.2  # what it took in the background too
        assert checkpoint.loop_state() == {"groups": [1]}

    asyncio.run(run())


def test_a_save_that_failed_is_raised_at_the_next_step_and_leaves_no_checkpoint(tmp_path):
    async def run():
        store, trainer = make_store(tmp_path), Trainer()
        saver = Saver(store, trainer, tmp_path / "policy")
        await saver.begin(4, {})
        saver.commit({"step": 4})
        trainer.failure = OSError("No space left on device")
        trainer.ready.set()
        with pytest.raises(CheckpointError, match="step-00000004.*No space left"):
            await saver.wait()
        with pytest.raises(CheckpointError):
            saver.check()
        assert store.scan() == ([], [])

    asyncio.run(run())
