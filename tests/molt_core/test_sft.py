"""The warm-up: it learns, its wrong labels are as many as declared, and its folder is whole, exact and repeatable."""

import json

import numpy as np
import pytest
import torch
import typer
from torch.multiprocessing import ProcessRaisedException
from typer.testing import CliRunner

from molt_core import sft
from molt_core.config import OptimizerConfig, RunConfig, TrainerConfig, WarmupConfig
from molt_core.data import DataError, PromptSource, prompt_source
from molt_core.models.load import content_hash, eos_token_id, excluded_token_ids, load_policy
from molt_core.models.tiny import build_tiny_qwen3_vl_moe
from molt_core.render import Renderer
from molt_core.train.collate import collate
from molt_core.types import Item
from tests.harness.trainer_cases import oracle_logits

MEGATRON = "harness.baselines.megatron_core:MegatronCoreBackend"


def _config(**warmup):
    return RunConfig.model_validate(
        {
            "model": {"builtin": "tiny-qwen3-vl-moe"},
            "task": {"source": "shapes", "eval_items": 32},
            "rollout": {"sampling": {"max_new_tokens": 4}},
            "warmup": {"steps": 12, "rows_per_step": 8, **warmup},
        }
    )


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    out = tmp_path_factory.mktemp("warmup") / "checkpoint"
    return out, sft.warm_up(_config(), out)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(build_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("tiny") / "policy"))


def test_loss_starts_at_that_of_a_uniform_guess_and_falls(warmed):
    out, record = warmed
    sampled_ids = 384 - len(excluded_token_ids(out))
    assert record["loss_first"] == pytest.approx(np.log(sampled_ids), abs=0.1)
    assert record["loss_last"] < 0.75 * record["loss_first"]


def test_record_names_the_weights_in_the_folder(warmed):
    out, record = warmed
    assert json.loads((out / "warmup.json").read_text()) == record
    assert record["content_hash"] == content_hash(out)
    assert record["steps"] == 12


def test_the_same_configuration_gives_the_same_weights_and_another_seed_does_not(warmed, tmp_path):
    _, record = warmed
    assert sft.warm_up(_config(), tmp_path / "again")["content_hash"] == record["content_hash"]
    other = sft.warm_up(_config(seed=1), tmp_path / "other")
    assert other["content_hash"] != record["content_hash"]


def test_a_finished_warmup_is_not_made_again(warmed):
    with pytest.raises(FileExistsError):
        sft.warm_up(_config(), warmed[0])


def test_a_failure_leaves_no_folder(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(sft, "content_hash", fail)
    with pytest.raises(OSError, match="disk full"):
        sft.warm_up(_config(steps=1), tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_weights_that_nothing_can_be_trained_on_leave_no_folder(tmp_path):
    """A learning rate that ruins them in a step: the next loss is no number, and no arm may begin from what there is."""
    with pytest.raises(FloatingPointError, match="is not finite; a lower warmup.lr"):
        sft.warm_up(_config(steps=3, lr=1e30), tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize(
    ("prompt", "answer", "max_length", "said"),
    [
        (
            "what color?",
            "use <|im_start|> here",
            128,
            r"prompt q1: its answer.* has <\|im_start\|>,",
        ),
        (
            "red " * 40,
            "blue",
            32,
            r"prompt q1: \d+ tokens with its answer, and model.max_length is 32",
        ),
    ],
)
def test_a_row_that_no_run_could_sample_is_named(tmp_path, prompt, answer, max_length, said):
    """Its loss was infinite, and the advice a lower learning rate; or it was trained though no engine takes it."""
    rows = [{"id": f"q{n}", "prompt": "what color?", "answer": "red"} for n in range(4)]
    rows[1] |= {"prompt": prompt, "answer": answer}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = _config(steps=1, rows_per_step=3, true_label_fraction=1.0).model_dump()
    config["task"] = {"source": str(file), "eval_items": 1}
    config["model"]["max_length"] = max_length
    with pytest.raises(DataError, match=said):
        sft.warm_up(RunConfig.model_validate(config), tmp_path / "out")


def test_frozen_routers_stay_as_they_are_in_the_warm_up_too(tmp_path):
    config = _config(steps=1).model_copy(update={"optimizer": OptimizerConfig(freeze_router=True)})
    sft.warm_up(config, tmp_path / "out")
    before = load_policy(tmp_path / "models" / "tiny-qwen3-vl-moe-seed0").state_dict()
    moved = {
        name: not torch.equal(weight, before[name])
        for name, weight in load_policy(tmp_path / "out").state_dict().items()
    }
    routers = [name for name in moved if name.endswith("mlp.gate.weight")]
    assert routers and not any(moved[name] for name in routers)
    assert moved["lm_head.weight"]


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_share_of_right_labels(renderer, fraction):
    """Right by declaration or by chance: fraction + (1 - fraction) / 4 of four colors, within four standard errors."""
    items = prompt_source(_config().task, "train", 0)
    warmup = WarmupConfig(rows_per_step=1000, true_label_fraction=fraction)
    rows = sft.supervised_rows(items, 0, warmup, np.random.default_rng(0), renderer, eos=374)
    labels = [renderer.decode(row.token_ids[row.action_mask]) for row in rows]
    share = np.mean([label == items.item(n).answer for n, label in enumerate(labels)])
    expected = fraction + (1 - fraction) / 4
    assert abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / 1000)


def test_answers_and_the_end_of_turn_are_what_is_trained(renderer):
    items = prompt_source(_config().task, "train", 0)
    warmup = WarmupConfig(rows_per_step=3, true_label_fraction=1.0)
    rows = sft.supervised_rows(items, 0, warmup, np.random.default_rng(0), renderer, eos=374)
    for number, row in enumerate(rows):
        prompt = renderer.prompt(items.item(number), number)
        assert tuple(row.token_ids[: row.prompt_length]) == prompt.token_ids
        trained = row.token_ids[row.action_mask].tolist()
        assert trained == [*renderer.encode(items.item(number).answer), 374]


def test_every_reply_of_a_conversation_is_trained_and_nothing_else(renderer):
    turns = [("user", "what color?"), ("assistant", "red"), ("user", "sure?")]
    messages = tuple({"role": role, "content": text} for role, text in turns)
    items = PromptSource(lambda number: Item("q", messages, answer="blue"), 1, None)
    warmup = WarmupConfig(rows_per_step=1, true_label_fraction=1.0)
    (row,) = sft.supervised_rows(items, 0, warmup, np.random.default_rng(0), renderer, eos=374)
    spoken = [row.token_ids[turn.start : turn.stop].tolist() for turn in row.turns]
    assert spoken == [[*renderer.encode(reply), 374] for reply in ("red", "blue")]
    assert row.token_ids[row.action_mask].tolist() == sum(spoken, [])


LAYOUTS = {
    "one rank, row by row": {"micro_batch_rows": 1},
    "one rank, Megatron-Core": {"backend": MEGATRON, "max_tokens_per_micro_batch": 64},
    "two ranks, three rows": {"world_size": 2, "micro_batch_rows": 3},
}


@pytest.fixture(scope="module")
def plain(renderer, tmp_path_factory):
    """The same rows through transformers and AdamW: the mean over all trained tokens, in one pass."""
    source = build_tiny_qwen3_vl_moe(tmp_path_factory.mktemp("plain") / "policy")
    policy, excluded = load_policy(source), list(excluded_token_ids(source))
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.0)
    items = prompt_source(_config().task, "train", sft.WARMUP_STREAM)
    rng, losses = np.random.default_rng((sft.WARMUP_STREAM, 0)), []
    for step in range(3):
        warmup, eos = _config(rows_per_step=7).warmup, eos_token_id(source)
        rows = sft.supervised_rows(items, 7 * step, warmup, rng, renderer, eos)
        logits = oracle_logits(policy, rows)
        logits[:, excluded] = -torch.inf
        loss = torch.nn.functional.cross_entropy(logits, collate(rows).action_ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(policy.named_parameters())


@pytest.mark.distributed
@pytest.mark.parametrize("trainer", LAYOUTS.values(), ids=LAYOUTS)
def test_every_trainer_and_layout_takes_the_plain_trainers_steps(plain, trainer, tmp_path):
    losses, expected = plain
    config = _config(steps=3, rows_per_step=7).model_copy(
        update={"trainer": TrainerConfig.model_validate(trainer)}
    )
    record = sft.warm_up(config, tmp_path / "out")
    assert record["loss_first"] == pytest.approx(losses[0], rel=1e-5)
    assert record["loss_last"] == pytest.approx(losses[-1], rel=1e-4)
    for name, weight in load_policy(tmp_path / "out").named_parameters():
        # AdamW turns rounding of a gradient near 0 into a part of its step, which is 1e-3.
        assert float((weight - expected[name]).abs().max()) < 1e-4, name


@pytest.mark.distributed
def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path):
    trainer = {"world_size": 2, "backend": "tests.harness.wrong_trainers:FailsOnTheSecondRank"}
    config = _config(steps=1).model_copy(update={"trainer": TrainerConfig.model_validate(trainer)})
    with pytest.raises(ProcessRaisedException, match="the second rank gives up"):
        sft.warm_up(config, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_items_are_no_run_seeds_items(monkeypatch, tmp_path):
    seeds = []
    original = sft.prompt_source
    monkeypatch.setattr(
        sft,
        "prompt_source",
        lambda t, split, seed: seeds.append((split, seed)) or original(t, split, seed),
    )
    sft.warm_up(_config(steps=1), tmp_path / "checkpoint")
    assert ("train", sft.WARMUP_STREAM) in seeds
    assert all(seed >= sft.WARMUP_STREAM for split, seed in seeds if split == "train")


def test_greedy_sampling_takes_the_most_likely_token_of_each_whole_forward_pass(warmed, renderer):
    """Against transformers' own forward pass on one unpadded row at a time."""
    out, _ = warmed
    theirs, excluded = load_policy(out), list(excluded_token_ids(out))
    items = prompt_source(_config().task, "eval", 0)
    prompts = [renderer.prompt(items.item(n), n) for n in range(4)]
    eos = eos_token_id(out)
    answers = sft.sample(load_policy(out), prompts, 3, torch.tensor(excluded), eos, temperature=0)
    for prompt, answer in zip(prompts, answers):
        expected = []
        while len(expected) < 3 and eos not in expected:
            row = collate([sft._row(prompt, [*expected, eos])])
            with torch.no_grad():
                logits = theirs(
                    input_ids=row.token_ids[None, :-1],
                    position_ids=row.position_ids[:, None, :-1],
                    pixel_values=row.patches,
                    image_grid_thw=row.grid_thw,
                ).logits[0, -1]
            logits[excluded] = -torch.inf
            expected.append(int(logits.argmax()))
        assert answer == expected


def test_command_writes_the_folder(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {builtin: tiny-qwen3-vl-moe}\ntask: {source: shapes, eval_items: 8}\n"
        "warmup: {steps: 2, rows_per_step: 4}\n"
    )
    arguments = [str(file), "--out", str(tmp_path / "checkpoint")]
    app = typer.Typer()
    app.command()(sft.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "warm-up done" in result.output
    load_policy(tmp_path / "checkpoint")
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and "exists; a finished warm-up is never made again" in again.output


def test_a_configuration_without_warmup_is_refused(tmp_path):
    config = RunConfig.model_validate(
        {"model": {"builtin": "tiny-qwen3-vl-moe"}, "task": {"source": "shapes"}}
    )
    with pytest.raises(ValueError, match="no warmup section"):
        sft.warm_up(config, tmp_path / "checkpoint")
