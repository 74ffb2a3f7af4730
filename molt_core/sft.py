"""Supervised training: the warm-up that makes the one initial checkpoint which all arms and seeds share.

A policy from random weights never emits an answer, and reinforcement learning has nothing to reinforce. So it is shown answers,
of which only a share is right (``warmup.true_label_fraction``; the others are answers to other questions): it learns to answer,
and is left something to learn. Same configuration, same threads: same weights.

    python -m molt_core.sft CONFIG.yaml --out FOLDER

The trainer is that of CONFIG (``trainer``), in as many processes on this machine as it has ranks: rows end to end in
micro-batches, and a sum that does not depend on how they are cut, as in a run. Trained are the answer and its end of turn, and
what the assistant says earlier in the row's conversation, by the chat template's own account (``Renderer.conversation``).
FOLDER becomes a Hugging Face folder with ``warmup.json`` in it; it appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from molt_core.agents.load import make_grader
from molt_core.config import OptimizerConfig, RunConfig, WarmupConfig, load_run_config
from molt_core.data import (
    DataError,
    PromptSource,
    check_images_are_read,
    check_prompts,
    prompt_source,
)
from molt_core.models.builtin import resolve_checkpoint
from molt_core.models.load import (
    atomic_folder,
    content_hash,
    eos_token_id,
    excluded_token_ids,
    load_policy,
    save_policy,
)
from molt_core.render import Renderer
from molt_core.train.backend import TrainBackend, backend_class
from molt_core.train.collate import collate
from molt_core.train.logprobs import ActionDistribution
from molt_core.train.policy import ActionPolicy
from molt_core.train.split import filler_row, split_rows
from molt_core.train.weights import whole_weights
from molt_core.types import NOT_SAMPLED, Prompt, Trajectory, Turn

WARMUP_STREAM = 1 << 32
"""Added to ``warmup.seed``: the warm-up draws items that no run's seed draws."""

LOSSES = "losses.json"


def warm_up(config: RunConfig, out: Path, console: Console | None = None) -> dict:
    """Train, evaluate and write ``out``; returns the contents of ``warmup.json``.

    Raises ValueError without a warmup section and FileExistsError where ``out`` exists.
    """
    source = beginning(config, out)
    excluded = torch.tensor(excluded_token_ids(source))
    renderer, eos, sampling = Renderer(source), eos_token_id(source), config.rollout.sampling
    with atomic_folder(out) as folder:
        losses = _train(config, source, folder, console is not None)
        policy = load_policy(folder, config.model.dtype).to(config.trainer.device)
        torch.manual_seed(config.warmup.seed)
        rewards = [
            evaluate(config, policy, renderer, excluded, eos, temperature)
            for temperature in (config.evaluation.temperature, sampling.temperature)
        ]
        record = {
            "content_hash": content_hash(folder),
            "steps": config.warmup.steps,
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "eval_reward": rewards[0],
            "eval_reward_sampled": rewards[1],
        }
        (folder / "warmup.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def beginning(config: RunConfig, out: Path) -> Path:
    """The folder that training begins from; raises as ``warm_up`` does, before it starts anything."""
    if config.warmup is None:
        raise ValueError("the configuration has no warmup section; add one, e.g. warmup: {}")
    if out.exists():
        raise FileExistsError(f"{out} exists; a finished warm-up is never made again in its place")
    policy = resolve_checkpoint(config.model, out.parent / "models")
    check_images_are_read(config, policy)
    return policy


def _train(config: RunConfig, source: Path, folder: Path, shown: bool) -> list[float]:
    """Train in ``trainer.world_size`` processes, in this one where one is enough; the loss of each step.

    Where a rank fails the others are ended, and its error is raised.
    """
    with tempfile.TemporaryDirectory() as place:
        arguments = (config, source, folder, Path(place), shown)
        if config.trainer.world_size == 1:
            _train_rank(0, *arguments)
        else:
            torch.multiprocessing.spawn(_train_rank, arguments, nprocs=config.trainer.world_size)
        return json.loads((Path(place) / LOSSES).read_text())


def _train_rank(
    rank: int, config: RunConfig, source: Path, folder: Path, place: Path, shown: bool
) -> None:
    """One rank's part in it. Rank 0 writes the weights into ``folder``, and the losses over all ranks to ``place``."""
    warmup, trainer = config.warmup, config.trainer
    torch.set_num_threads(trainer.threads)
    if trainer.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if trainer.device == "cuda" else "gloo",
        init_method=f"file://{place}/rendezvous",
        rank=rank,
        world_size=trainer.world_size,
    )
    try:
        backend = backend_class(trainer.backend)(
            source,
            config.model.model_copy(update={"routing_replay": False}),
            _optimizer(config),
            trainer,
            warmup.steps,
        )
        renderer, eos = Renderer(source), eos_token_id(source)
        excluded = frozenset(excluded_token_ids(source))
        on_device = torch.tensor(sorted(excluded), device=trainer.device)
        distribution = ActionDistribution(1.0, on_device)
        items = prompt_source(config.task, "train", WARMUP_STREAM + warmup.seed)
        rng = np.random.default_rng((WARMUP_STREAM, warmup.seed))
        losses = []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=rank > 0 or not shown) as progress:
            bar = progress.add_task("warm-up", total=warmup.steps)
            for step in range(warmup.steps):
                first = step * warmup.rows_per_step
                rows = supervised_rows(items, first, warmup, rng, renderer, eos)
                for number, row in enumerate(rows, start=first):
                    name = items.prompt_id(number)
                    check_row(name, row, renderer, excluded, config.model.max_length)
                losses.append(_step(backend, rows, config, distribution, renderer.merge_size))
                progress.update(bar, advance=1, description=f"warm-up  loss {losses[-1]:.3f}")
        weights = whole_weights(backend.weights())
        if rank == 0:
            save_policy(weights, source, folder)
            (place / LOSSES).write_text(json.dumps(losses))
        else:
            for _ in weights:  # sends its rows
                pass
    finally:
        dist.destroy_process_group()


def _optimizer(config: RunConfig) -> OptimizerConfig:
    return OptimizerConfig(
        lr=config.warmup.lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        clip_norm=1.0,
        freeze_router=config.optimizer.freeze_router,
    )


def _step(
    backend: TrainBackend,
    rows: Sequence[Trajectory],
    config: RunConfig,
    distribution: ActionDistribution,
    merge_size: int,
) -> float:
    """One optimiser step on the mean of minus the log-probability over all trained tokens of ``rows``; that mean."""
    count = sum(row.action_tokens for row in rows)
    share = split_rows(rows, backend.data_size, config.trainer)[backend.data_rank]
    total = torch.zeros((), dtype=torch.float64, device=config.trainer.device)
    for number, part in enumerate(share):
        own = [rows[i] for i in part] or [filler_row(rows[0])]
        logprobs, _ = backend.action_logprobs(collate(own, merge_size=merge_size), distribution)
        loss = -logprobs.sum() / count
        backend.backward(loss, is_last=number == len(share) - 1)
        total += loss.detach()
    dist.all_reduce(total)
    norm = backend.optimizer_step()
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise FloatingPointError(
            f"loss {float(total)} or gradient norm {norm} is not finite; a lower warmup.lr may do"
        )
    # Ranks of one place (of a tensor-parallel group) have the same rows.
    return float(total) * backend.data_size / dist.get_world_size()


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
        prompt, said = renderer.conversation(item, index)
        rows.append(_row(prompt, [*renderer.encode(str(answer)), eos], said))
    return rows


def check_row(
    prompt_id: str, row: Trajectory, renderer: Renderer, excluded: frozenset[int], max_length: int
) -> None:
    """Raises DataError for a row that a run could never sample: one too long, or with a token of probability 0."""
    if len(row.token_ids) > max_length:
        raise DataError(
            f"prompt {prompt_id}: {len(row.token_ids)} tokens with its answer, and model.max_length is {max_length}; raise it, "
            "or leave the row out"
        )
    never = excluded.intersection(row.token_ids[row.action_mask].tolist())
    if never:
        raise DataError(
            f"prompt {prompt_id}: its answer, the other one that a false label is, or a reply before it has "
            f"{renderer.token(min(never))}, which is never sampled; write it otherwise"
        )


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
    model, excluded = ActionPolicy(policy.eval()), excluded.to(policy.device)
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(prompts), rows_at_once):
        going = list(range(start, min(start + rows_at_once, len(prompts))))
        for _ in range(max_new_tokens):
            rows = [_row(prompts[n], [*answers[n], eos]) for n in going]
            ends = torch.tensor([row.action_tokens for row in rows]).cumsum(0) - 1
            hidden = model.hidden(collate(rows).to(policy.device))[ends]
            logits = policy.lm_head(hidden).float()
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


def _row(
    prompt: Prompt, answer_ids: Sequence[int], said: Sequence[tuple[int, int]] = ()
) -> Trajectory:
    """A supervised row in the shape of a trajectory: what the assistant says stands where sampled tokens would.

    said: spans of the prompt that it said before.
    """
    length = len(prompt.token_ids) + len(answer_ids)
    spans = (*said, (len(prompt.token_ids), length))
    mask = np.zeros(length, bool)
    for start, stop in spans:
        mask[start:stop] = True
    return Trajectory(
        token_ids=np.array([*prompt.token_ids, *answer_ids], dtype=np.int32),
        prompt_length=spans[0][0],
        action_mask=mask,
        logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, NOT_SAMPLED).astype(np.int32),
        mixed=np.zeros(length, bool),
        turns=tuple(Turn(start, stop, {}, 0, "supervised") for start, stop in spans),
        images=prompt.images,
    )


def main(
    config: Annotated[Path, typer.Argument(help="RunConfig YAML with a warmup section")],
    out: Annotated[Path, typer.Option(help="folder of the checkpoint to write")],
) -> None:
    """Warm up a policy with a few supervised steps and write it as a Hugging Face folder."""
    try:
        run = load_run_config(config)
        beginning(run, out)
        check_prompts(run.task)
    except (ValueError, OSError) as error:
        typer.echo(f"{config}: {error}", err=True)
        raise typer.Exit(2) from error
    torch.set_num_threads(run.trainer.threads)
    console = Console()
    try:
        record = warm_up(run, out, console)
    except DataError as error:
        typer.echo(f"{config}: {error}", err=True)
        raise typer.Exit(2) from error
    console.print(
        f"warm-up done: loss {record['loss_first']:.2f} -> {record['loss_last']:.2f}, held-out reward "
        f"{record['eval_reward']:.2f} (sampled {record['eval_reward_sampled']:.2f}), weights {record['content_hash'][:12]}"
    )


if __name__ == "__main__":
    typer.run(main)
