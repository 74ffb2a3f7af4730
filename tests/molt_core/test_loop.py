"""The whole loop on real parts: vLLM, Ray, FSDP2, the built-in policy. One run serves many assertions."""

import asyncio
import hashlib
import json

import pytest

from molt_core.agents.base import Result
from molt_core.config import RunConfig
from molt_core.data import prompt_source
from molt_core.fields import FIELDS
from molt_core.loop import Loop
from molt_core.metrics import RunWriter
from molt_core.models.load import content_hash, load_policy
from molt_core.train.state import SavedState

pytestmark = pytest.mark.engine
STEPS = 8


async def judge_that_is_down() -> None:
    await asyncio.sleep(0)
    raise RuntimeError("a judge that is down")


class ParityAgent:
    """Rewards an even sum of sampled ids, so that an untrained policy has something to learn from.

    On prompt 5 it fails beside its call, of whose answer it never hears.
    """

    def __init__(self, task) -> None: ...

    async def run(self, context) -> Result:
        asked = context.generate(context.prompt.token_ids, context.prompt.images)
        if context.prompt.index == 5:
            await asyncio.gather(asked, judge_that_is_down())
        generation = await asked
        return Result(float(sum(generation.token_ids) % 2 == 0))


def run_config(**changes) -> RunConfig:
    base = {
        "model": {"builtin": "tiny-qwen3-vl-moe", "max_length": 96},
        "task": {
            "source": "shapes",
            "agent": "tests.molt_core.test_loop:ParityAgent",
            "eval_items": 8,
        },
        "rollout": {
            "groups_per_step": 4,
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 48, "stop_at_eos": False},
        },
        "loop": {"steps": STEPS, "max_staleness": 1},
        "evaluation": {"every": 4},
        "engine": {"max_sequences": 64, "kv_cache_blocks": 256},
        "seed": 3,
    }
    return RunConfig.model_validate(base | changes)


def run_loop(config: RunConfig, checkpoint, folder) -> list[dict]:
    asyncio.run(Loop(config, checkpoint, RunWriter(folder, 1, config.loop.steps)).run())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def records(ray_session, tiny_checkpoint, tmp_path_factory) -> list[dict]:
    return run_loop(run_config(), tiny_checkpoint, tmp_path_factory.mktemp("run"))


def test_one_record_a_step_and_an_initial_one(records):
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert [record["policy_version"] for record in records[1:]] == list(range(1, STEPS + 1))


def test_the_record_is_what_its_list_says(records):
    for record in records:
        assert set(record) <= set(FIELDS), "a recorded field is not in molt_core/fields.py"
    for record in records[1:]:
        assert {name for name, when in FIELDS.items() if when == "every step"} <= set(record)


def test_books_close_at_every_step_and_the_failing_agent_is_counted(records):
    for record in records[1:]:
        for unit in ("tokens", "groups"):
            accounted = record[f"{unit}_trained"] + record[f"{unit}_in_flight"]
            accounted += sum(record[f"{unit}_dropped"].values())
            assert record[f"{unit}_generated"] == accounted
    last = records[-1]
    assert last["groups_dropped"] == {"agent_error": 1}
    assert last["groups_trained"] == STEPS * 4
    # Every rollout samples exactly 48 tokens, also the one whose agent fails.
    assert last["tokens_dropped"] == {"agent_error": 4 * 48}
    assert last["tokens_trained"] == STEPS * 4 * 4 * 48


def test_evaluations_and_probes_have_books_of_their_own(records):
    evaluated = probed = 0
    for record in records:
        # The failing agent's tokens were sampled as well; its rollout, and the length of its answer, is lost.
        evaluated += record.get("eval_tokens", 0) + 48 * record.get("eval_failed", 0)
        probed += record["mismatch_tokens"] + record["tokens_router_tied"]
        if record["step"]:
            assert (record["tokens_evaluation"], record["tokens_probe"]) == (evaluated, probed)
    assert evaluated > 0


def test_trainer_and_engine_work_at_the_same_time(records):
    assert sum(record["t_overlap_s"] for record in records[1:]) > 0
    for record in records[1:]:
        busy = record["t_forward_backward_s"] + record["t_optimizer_s"]
        assert record["t_overlap_s"] <= busy + 0.01


def test_tokens_are_generated_across_refits_and_lag_is_bounded(records):
    assert sum(record["tokens_across_refit"] for record in records[1:]) > 0
    assert max(record["lag_max"] for record in records[1:]) == 1


def test_trainer_and_engine_agree_on_every_version(records):
    for record in records:
        assert record["mismatch_tokens"] + record["tokens_router_tied"] >= 256
        assert record["mismatch_p99"] <= 1e-5
        assert record["mismatch_max"] <= 1e-3


def test_the_policy_is_updated(records):
    assert all(record["grad_norm"] > 0 for record in records[1:])


def test_prompt_fingerprint_is_the_hash_of_prompt_ids_in_dispatch_order(records):
    config = run_config()
    source = prompt_source(config.task, "train", config.seed)
    ids = "".join(f"{source.item(index).prompt_id}\n" for index in range(2 * 4))
    assert records[2]["prompts_fingerprint"] == hashlib.sha256(ids.encode()).hexdigest()[:16]


def test_synchronous_training_with_two_engines_and_two_ranks(
    ray_session, tiny_checkpoint, tmp_path, records
):
    config = run_config(
        loop={"steps": 2, "max_staleness": 0},
        engine={"count": 2, "max_sequences": 64, "kv_cache_blocks": 256},
        trainer={"world_size": 2, "micro_batch_rows": 5},
        algorithm={"loss": "gspo", "aggregation": "sequence_mean", "kl": {"coef": 0.01}},
        probe={"doubt_above": 0},
    )
    synchronous = run_loop(config, tiny_checkpoint, tmp_path)
    assert [record["lag_max"] for record in synchronous[1:]] == [0, 0]
    # Every probe is in doubt here, no rounding error being 0, and none was where the bound is the usual one.
    for record, usual in zip(synchronous, records):
        assert record["mismatch_tokens"] + record["tokens_router_tied"] >= 5 * 256
        assert usual["mismatch_tokens"] + usual["tokens_router_tied"] < 2 * 256
    assert sum(record["tokens_across_refit"] for record in synchronous[1:]) == 0
    assert max(record["mismatch_max"] for record in synchronous) <= 1e-3
    assert [record["policy_version"] for record in synchronous[1:]] == [1, 2]
    # The reference is the initial policy: 0 at the first step if every row got its own log-probabilities back, not later.
    assert abs(synchronous[1]["kl_reference"]) < 1e-9 < 1e-6 < synchronous[2]["kl_reference"]
    # Same seed, so the same prompts in the same order, whatever the layout and the schedule.
    for step in (1, 2):
        assert synchronous[step]["prompts_fingerprint"] == records[step]["prompts_fingerprint"]
    policy = tmp_path / "checkpoints" / "policy"
    assert content_hash(policy) != content_hash(tiny_checkpoint)
    load_policy(policy)


def test_gae_trains_policy_and_critic_each_in_its_processes(ray_session, tiny_checkpoint, tmp_path):
    config = run_config(
        loop={"steps": 4, "max_staleness": 1},
        algorithm={"advantage": "gae"},
        critic={"lr": 0.02, "warmup_steps": 1, "placement": "separate"},
        checkpoint={"every_steps": 3},
    )
    _, first, *later = run_loop(config, tiny_checkpoint, tmp_path)
    # Values are 0 at first, returns 0 or 1: the loss is half the mean reward of the batch's tokens, and nothing is explained.
    assert 0.1 < first["value_loss"] < 0.5
    assert first["explained_variance"] == 0
    assert all(record["critic_grad_norm"] > 0 for record in (first, *later))
    # Warm: the second batch's returns are nearer to its values than to 0, and from then on the policy is stepped.
    assert later[0]["value_loss"] < first["value_loss"]
    assert [record["stepped"] for record in (first, *later)] == [0, 1, 1, 1]
    assert later[-1]["optimizer_steps"] == 3
    assert {record["devices"] for record in later} == {3}
    assert set().union(*(first, *later)) <= set(FIELDS)
    state = tmp_path / "checkpoints" / "step-00000003" / "trainer"
    assert SavedState(state).steps == 2
    assert SavedState(state / "critic").steps == 3
