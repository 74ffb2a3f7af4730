"""The warm-up: a short supervised run that makes the one initial checkpoint which all arms and seeds share.

A policy from random weights never emits an answer, and reinforcement learning has nothing to reinforce. So it is shown answers,
of which only a share is right (``warmup.true_label_fraction``; the others are answers to other questions): it learns to answer,
and is left something to learn. Same configuration, same threads: same weights.

    python -m molt_core.sft CONFIG.yaml --out FOLDER

FOLDER becomes a Hugging Face folder with ``warmup.json`` in it; it appears whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from molt_core.agents.base import make_grader
from molt_core.config import RunConfig, WarmupConfig, load_run_config
from molt_core.data import PromptSource, prompt_source
from molt_core.models.load import (
    atomic_folder,
    content_hash,
    eos_token_id,
    excluded_token_ids,
    load_policy,
    resolve_checkpoint,
    save_policy,
)
from molt_core.render import Renderer
from molt_core.train.collate import collate
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.policy import ActionPolicy
from molt_core.types import NOT_SAMPLED, Prompt, Trajectory, Turn

WARMUP_STREAM = 1 << 32
"""Added to ``warmup.seed``: the warm-up draws items that no run's seed draws."""


def warm_up(config: RunConfig, out: Path, console: Console | None = None) -> dict:
    """Train, evaluate and write ``out``; returns the contents of ``warmup.json``.

    Raises ValueError without a warmup section and FileExistsError where ``out`` exists.
    """
    if config.warmup is None:
        raise ValueError("the configuration has no warmup section")
    if out.exists():
        raise FileExistsError(f"{out} exists; a finished warm-up is never made again in its place")
    torch.manual_seed(config.warmup.seed)
    source = resolve_checkpoint(config.model, out.parent / "models")
    renderer = Renderer(source)
    policy = load_policy(source, config.model.dtype)
    excluded = torch.tensor(excluded_token_ids(source))
    eos = eos_token_id(source)
    losses = _train(config, policy, renderer, excluded, eos, console)
    record = {
        "steps": config.warmup.steps,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "eval_reward": evaluate(
            config, policy, renderer, excluded, eos, config.evaluation.temperature
        ),
        "eval_reward_sampled": evaluate(
            config, policy, renderer, excluded, eos, config.rollout.sampling.temperature
        ),
    }
    with atomic_folder(out) as folder:
        save_policy(policy, source, folder)
        record = {"content_hash": content_hash(folder), **record}
        (folder / "warmup.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _train(
    config: RunConfig,
    policy: nn.Module,
    renderer: Renderer,
    excluded: torch.Tensor,
    eos: int,
    console: Console | None,
) -> list[float]:
    warmup = config.warmup
    items = prompt_source(config.task, "train", WARMUP_STREAM + warmup.seed)
    rng = np.random.default_rng((WARMUP_STREAM, warmup.seed))
    model, distribution = ActionPolicy(policy.train()), ActionDistribution(1.0, excluded)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=warmup.lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console is None) as progress:
        bar = progress.add_task("warm-up", total=warmup.steps)
        for step in range(warmup.steps):
            rows = supervised_rows(items, step * warmup.rows_per_step, warmup, rng, renderer, eos)
            batch = collate(rows, merge_size=renderer.merge_size)
            logprobs, _ = model(batch, distribution)
            loss = -logprobs.mean()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            progress.update(bar, advance=1, description=f"warm-up  loss {losses[-1]:.3f}")
    return losses


def supervised_rows(
    items: PromptSource,
    first: int,
    warmup: WarmupConfig,
    rng: np.random.Generator,
    renderer: Renderer,
    eos: int,
) -> list[Trajectory]:
    """``rows_per_step`` rows from dispatch index ``first``: prompt, then the right answer or another item's, then ``eos``."""
    rows = []
    for index in range(first, first + warmup.rows_per_step):
        item = items.item(index)
        answer = item.answer
        if rng.random() >= warmup.true_label_fraction:
            answer = items.item(int(rng.integers(len(items)))).answer
        rows.append(_row(renderer.prompt(item, index), [*renderer.encode(str(answer)), eos]))
    return rows


def evaluate(
    config: RunConfig,
    policy: nn.Module,
    renderer: Renderer,
    excluded: torch.Tensor,
    eos: int,
    temperature: float,
) -> float:
    """Mean reward of one answer to each held-out item; temperature 0 is greedy."""
    items = prompt_source(config.task, "eval", 0)
    prompts = [renderer.prompt(items.item(index), index) for index in range(len(items))]
    sampling = config.rollout.sampling
    answers = sample(policy, prompts, sampling.max_new_tokens, excluded, eos, temperature)
    grade = make_grader(config.task)
    rewards = [grade(p.answer, renderer.decode(answer)) for p, answer in zip(prompts, answers)]
    return float(np.mean(rewards))


@torch.no_grad()
def sample(
    policy: nn.Module,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    excluded: torch.Tensor,
    eos: int,
    temperature: float,
    rows_at_once: int = 64,
) -> list[list[int]]:
    """One answer a prompt, ``eos`` included where it was sampled. Plain and slow: one whole forward pass a token.

    For a few hundred short answers without an engine; random numbers come from torch's global generator.
    """
    model = ActionPolicy(policy.eval())
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), rows_at_once):
        going = list(range(start, min(start + rows_at_once, len(prompts))))
        for _ in range(max_new_tokens):
            rows = [_row(prompts[n], [*answers[n], eos]) for n in going]
            ends = torch.tensor([row.action_tokens for row in rows]).cumsum(0) - 1
            logits = policy.lm_head(model.hidden(collate(rows))[ends]).float()
            logits = logits.index_fill(1, excluded, -torch.inf)
            if temperature == 0:
                ids = logits.argmax(-1)
            else:
                ids = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
            for n, token in zip(going, ids.tolist()):
                answers[n].append(token)
            going = [n for n in going if answers[n][-1] != eos]
            if not going:
                break
    return answers


def _row(prompt: Prompt, answer_ids: Sequence[int]) -> Trajectory:
    """A supervised row in the shape of a trajectory: the answer stands where sampled tokens would."""
    start, stop = len(prompt.token_ids), len(prompt.token_ids) + len(answer_ids)
    mask = np.arange(stop) >= start
    return Trajectory(
        token_ids=np.array([*prompt.token_ids, *answer_ids], dtype=np.int32),
        prompt_length=start,
        action_mask=mask,
        logprobs=np.zeros(stop, np.float32),
        versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
        mixed=np.zeros(stop, bool),
        turns=(Turn(start, stop, {}, 0, "supervised"),),
        images=prompt.images,
    )


def main(
    config: Annotated[Path, typer.Argument(help="RunConfig YAML with a warmup section")],
    out: Annotated[Path, typer.Option(help="folder of the checkpoint to write")],
) -> None:
    """Warm up a policy with a few supervised steps and write it as a Hugging Face folder."""
    run = load_run_config(config)
    torch.set_num_threads(run.trainer.threads)
    console = Console()
    record = warm_up(run, out, console)
    console.print(
        f"warm-up done: loss {record['loss_first']:.2f} -> {record['loss_last']:.2f}, held-out reward "
        f"{record['eval_reward']:.2f} (sampled {record['eval_reward_sampled']:.2f}), weights {record['content_hash'][:12]}"
    )


if __name__ == "__main__":
    typer.run(main)
