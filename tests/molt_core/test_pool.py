"""The pool's promises: bounded lag, closed books, whole groups, dispatch order."""

import pickle
import random as stdlib_random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_core.config import LoopConfig, RolloutConfig
from molt_core.rollout.pool import BooksError, Pool
from molt_core.types import Batch, ContractError, Group, Rollout
from tests.molt_core.make import group, trajectory


def pool(size=3, staleness=1, steps=20, schedule="free", drop_zero_variance=False, name="p"):
    return Pool(
        RolloutConfig(
            groups_per_step=size, samples_per_prompt=2, drop_zero_variance=drop_zero_variance
        ),
        LoopConfig(steps=steps, max_staleness=staleness, schedule=schedule),
        lambda index: f"{name}{index}",
    )


def train_one(p: Pool):
    batch = p.take()
    if batch is not None:
        p.trained(batch, batch.action_tokens)
        p.version += 1
    return batch


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 4))
def test_lag_is_bounded_and_books_close_under_any_order_of_arrival(seed, staleness, size):
    random = stdlib_random.Random(seed)
    p = pool(size=size, staleness=staleness, steps=12)
    running = p.dispatch()
    while p.version < 12:
        if running and random.random() < 0.7:
            index = running.pop(random.randrange(len(running)))
            lost = random.random() < 0.2
            p.finish(group(index, version=p.running[index], status="agent_error" if lost else "ok"))
        else:
            batch = train_one(p)
            if batch is None and not running:
                running += p.dispatch()
                continue
            if batch is not None:
                assert p.fingerprints(p.version)[0]
                assert len(batch.groups) == size
                dispatched = [g.dispatched_version for g in batch.groups]
                assert batch.version - min(dispatched) <= staleness
        running += p.dispatch()
        p.check()
    assert p.groups.trained == 12 * size


def restarted(p: Pool, **kind) -> Pool:
    """A pool as the next attempt makes it, from a state that went through a file."""
    again = pool(**kind)
    again.restore(pickle.loads(pickle.dumps(p.state())))
    return again


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 4))
def test_after_kills_at_any_moment_no_prompt_is_lost_or_trained_twice(seed, staleness, size):
    """Whatever happened since the last save is forgotten, as a kill forgets it; arrivals come in any order."""
    random = stdlib_random.Random(seed)
    kind = {"size": size, "staleness": staleness, "steps": 10}
    p, trained = pool(**kind), []
    saved, trained_when_saved, kills = pickle.dumps(p.state()), [], 0
    running = p.dispatch()
    while p.version < 10:
        event = random.random()
        if event < 0.1:
            saved, trained_when_saved = pickle.dumps(p.state()), list(trained)
        elif event < 0.2 and kills < 5:
            kills += 1
            p, trained = pool(**kind), list(trained_when_saved)
            p.restore(pickle.loads(saved))
            running = []
        elif running and event < 0.8:
            index = running.pop(random.randrange(len(running)))
            lost = random.random() < 0.2
            p.finish(group(index, version=p.running[index], status="agent_error" if lost else "ok"))
        elif (batch := train_one(p)) is not None:
            trained += [g.index for g in batch.groups]
            assert batch.version - min(g.dispatched_version for g in batch.groups) <= staleness
        running += p.dispatch()
        p.check()
    assert len(trained) == len(set(trained)) == 10 * size == p.groups.trained
    dropped = p.groups.generated - len(trained) - len(p.running) - len(p.finished)
    assert dropped == sum(p.groups.dropped.values())
    left = set(p.running) | set(p.finished)
    assert len(set(trained) | left) + dropped == p.dispatched, "every place has one fate"


def test_finished_groups_are_kept_and_those_being_generated_are_started_again_first():
    p = pool(size=2, staleness=1)
    p.dispatch()
    p.finish(group(0))
    p.finish(group(2))
    train_one(p)
    p.finish(group(1))
    again = restarted(p, size=2, staleness=1)
    assert again.dispatch() == [3, 4, 5], "group 3 was in flight; two are new at version 1"
    assert again.running == {3: 1, 4: 1, 5: 1}
    again.check()
    again.finish(group(3, version=1))
    assert [g.index for g in train_one(again).groups] == [1, 3]


def test_fingerprints_go_on_as_if_nothing_had_happened():
    p = pool(size=2, staleness=0)
    for step in (1, 2):
        for index in p.dispatch():
            p.finish(group(index))
        train_one(p)
        if step == 1:
            p.fingerprints(1)
            again = restarted(p, size=2, staleness=0)
    for index in again.dispatch():
        again.finish(group(index))
    train_one(again)
    assert again.fingerprints(2) == p.fingerprints(2)


def test_other_data_than_the_checkpoint_was_written_with_are_refused():
    p = pool(size=2, staleness=0)
    p.dispatch()
    p.finish(group(0))
    with pytest.raises(ContractError, match="other prompts, or another order"):
        restarted(p, size=2, staleness=0, name="q")


def test_synchronous_training_dispatches_one_batch_a_version():
    p = pool(size=3, staleness=0)
    assert p.dispatch() == [0, 1, 2]
    assert p.dispatch() == []
    for index in range(3):
        p.finish(group(index))
    assert [g.index for g in train_one(p).groups] == [0, 1, 2]
    assert p.dispatch() == [3, 4, 5]


def test_a_group_that_would_grow_too_old_is_waited_for():
    p = pool(size=2, staleness=1)
    assert p.dispatch() == [0, 1, 2, 3]
    for index in (1, 2, 3):
        p.finish(group(index))
    assert [g.index for g in train_one(p).groups] == [1, 2]
    assert p.fingerprints(1)[0], "known although group 0 still runs"
    assert p.dispatch() == [4, 5]
    for index in (4, 5):
        p.finish(group(index, version=1))
    assert p.take() is None, (
        "group 0 was dispatched at version 0 and may not be older than one version"
    )
    p.finish(group(0))
    assert [g.index for g in train_one(p).groups] == [0, 3]


def test_lockstep_takes_in_dispatch_order_and_dispatches_only_into_an_empty_pool():
    p = pool(size=2, staleness=1, schedule="lockstep")
    assert p.dispatch() == [0, 1, 2, 3]
    p.finish(group(1))
    p.finish(group(2))
    assert p.take() is None, "group 0 comes first and is still running"
    p.finish(group(0))
    assert [g.index for g in train_one(p).groups] == [0, 1]
    assert p.dispatch() == [], "group 3 still runs"
    p.finish(group(3))
    assert p.dispatch() == [4, 5]


def test_a_dropped_group_is_replaced_and_counted_under_its_reason():
    p = pool(size=2, staleness=0, drop_zero_variance=True)
    p.dispatch()
    assert p.finish(group(0, rewards=(1.0, 1.0))) == "zero_variance"
    assert p.finish(group(1, status="agent_error")) == "agent_error"
    assert p.dispatch() == [2, 3]
    assert dict(p.groups.dropped) == {"zero_variance": 1, "agent_error": 1}
    assert p.tokens.dropped["zero_variance"] == group(0).tokens_generated
    p.check()


def test_a_lost_group_is_noticed():
    p = pool(size=2, staleness=0)
    p.dispatch()
    p.finish(group(0))
    del p.finished[0]
    with pytest.raises(BooksError, match="action tokens"):
        p.check()


def test_a_trainer_that_skips_tokens_is_noticed():
    p = pool(size=2, staleness=0)
    p.dispatch()
    for index in range(2):
        p.finish(group(index))
    batch = p.take()
    p.trained(batch, batch.action_tokens - 1)
    with pytest.raises(BooksError, match="action tokens"):
        p.check()


def test_prompt_fingerprint_follows_dispatch_order_not_arrival():
    first, second = pool(size=2, staleness=0), pool(size=2, staleness=0)
    for p, order in ((first, (0, 1)), (second, (1, 0))):
        p.dispatch()
        for index in order:
            p.finish(group(index))
        train_one(p)
    assert first.fingerprints(1) == second.fingerprints(1)
    other = pool(size=2, staleness=0, name="another")
    other.dispatch()
    for index in range(2):
        other.finish(group(index, prompt_id=f"another{index}"))
    train_one(other)
    assert other.fingerprints(1)[0] != first.fingerprints(1)[0]


def test_a_group_of_another_prompt_than_the_one_dispatched_is_refused():
    p = pool(size=2, staleness=0)
    p.dispatch()
    with pytest.raises(ContractError, match="dispatched was p0"):
        p.finish(group(0, prompt_id="p1"))


def test_lags_are_versions_at_training_less_versions_at_sampling():
    p = pool(size=1, staleness=2)
    batch = Batch((group(0, version=1),), version=3)
    assert set(p.lags(batch)) == {2}
    for version in (0, 4):  # one too old, one from the future
        with pytest.raises(ContractError, match="breaks max_staleness 2"):
            p.lags(Batch((group(0, version=version),), version=3))


def test_a_token_over_an_older_kv_cache_is_not_trained():
    p = pool(size=1)
    row = trajectory()
    mixed = replace(row, mixed=row.action_mask.copy())
    rollout = Rollout("0/0", (mixed,), 1.0)
    with pytest.raises(ContractError, match="older KV cache"):
        p.lags(Batch((Group("p0", 0, (rollout,), 3, 0),), version=0))


def test_never_more_groups_than_the_run_needs():
    p = pool(size=2, staleness=5, steps=2)
    assert p.dispatch() == [0, 1, 2, 3]
    assert p.dispatch() == []
