"""What a run is told: one strict pydantic model a concern. Light to import (no torch), so that a plan is checked at once.

Every field that changes a result has its place here and in the report's protocol table. An unknown key is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from molt_core.algo.config import AlgorithmConfig
from molt_core.combinations import CHECKS
from molt_core.strict import Strict


class ModelConfig(Strict):
    """The policy. Either a built-in tiny model, made from code and a seed, or a Hugging Face folder."""

    builtin: str | None = Field(
        None, description="name of a built-in model, e.g. tiny-qwen3-vl-moe"
    )
    builtin_seed: int = Field(0, description="seed of the built-in model's initial weights")
    path: str | None = Field(None, description="Hugging Face folder, where not built in")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="precision of the forward pass"
    )
    routing_replay: bool = Field(
        False,
        description="send each token of a training forward pass to the experts that the engine recorded for it",
    )
    max_length: int = Field(
        128, gt=0, description="longest trajectory in tokens, prompt and images included"
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.builtin is None) == (self.path is None):
            raise ValueError("give exactly one of model.builtin and model.path")
        return self


class TaskConfig(Strict):
    """Where prompts come from and how answers are graded."""

    source: str = Field(
        description="built-in task (shapes), or a .jsonl, .parquet or Hugging Face folder of rows"
    )
    agent: str = Field(
        "single_turn", description="agent program: a built-in name or 'package.module:Class'"
    )
    variant: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="parameters of a built-in task"
    )
    train_items: int = Field(
        4096, gt=0, description="training items of a built-in task; a file's rows are all used"
    )
    eval_items: int = Field(
        256, gt=0, description="held-out items, the same for every run, arm and seed"
    )


class SamplingConfig(Strict):
    """The behaviour distribution. Every field is sent to the engine and applied to the training logits alike."""

    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(8, gt=0)
    stop_at_eos: bool = True


class RolloutConfig(Strict):
    """How trajectories are collected."""

    groups_per_step: int = Field(16, gt=0, description="prompts (groups) in one training batch")
    samples_per_prompt: int = Field(8, gt=0)
    sampling: SamplingConfig = SamplingConfig()
    drop_zero_variance: bool = Field(
        False, description="drop groups whose rewards are all equal, dispatch others instead"
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Strict):
    """One frozen AdamW specification, read by every backend."""

    lr: float = Field(1e-3, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    decay_filter: Literal["matrices", "all"] = Field(
        "matrices", description="matrices: tensors of two or more dimensions"
    )
    clip_norm: float = Field(
        1.0, gt=0, description="bound on the global L2 norm over all parameters, over all ranks"
    )
    freeze_router: bool = Field(False, description="leave the routers of the experts untrained")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up; linear and cosine fall to 0 at the end"
    )
    warmup_steps: int = Field(0, ge=0)
    steps_per_batch: Literal[1] = Field(1, description="optimiser steps a batch")


class CriticConfig(Strict):
    """The value model that ``gae`` needs: a policy's backbone under a scalar head that begins at 0.

    But for ``lr`` its AdamW is that of ``optimizer``, with moments and a place in the schedule of its own.
    """

    path: str | None = Field(
        None, description="Hugging Face folder of the backbone; none: the policy's initial weights"
    )
    lr: float = Field(1e-3, gt=0)
    steps_per_batch: int = Field(1, gt=0, description="its optimiser steps a batch")
    clip: float | None = Field(
        None,
        gt=0,
        description="how far a value may move from that before the batch; none is off",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="first training steps, in which the critic is stepped and the policy is not",
    )
    placement: Literal["colocated", "separate"] = Field(
        "colocated",
        description="in the trainer's processes, one after the other; or in as many processes of its own, at the same time",
    )


class LoopConfig(Strict):
    """The asynchronous loop."""

    steps: int = Field(150, gt=0, description="training steps (batches consumed)")
    schedule: Literal["free", "lockstep"] = Field(
        "free", description="lockstep: fixed order, batch by batch"
    )
    max_staleness: int = Field(
        1, ge=0, description="largest lag in versions; 0 is synchronous, strictly on-policy"
    )


class EvaluationConfig(Strict):
    """Held-out evaluation on fixed items."""

    every: int = Field(
        25, gt=0, description="steps between evaluations; the last step is always evaluated"
    )
    temperature: float = Field(0.0, ge=0, description="0 is greedy")


class ProbeConfig(Strict):
    """Fresh tokens of the new version, scored by the trainer after a refit (invariant 4)."""

    every: int = Field(1, gt=0, description="refits between probes")
    tokens: int = Field(256, ge=1, description="least action tokens scored by a probe")
    doubt_above: float = Field(
        1e-5,
        ge=0,
        description="99th percentile, nats, above which a probe scores four times as many tokens more; all of them count",
    )
    new_tokens: int = Field(
        64,
        ge=1,
        description="longest continuation of a probe, where sampling.max_new_tokens is longer",
    )
    tie_gap: float = Field(
        1e-5,
        ge=0,
        description="router scores closer than this are a tie; of the tokens from it on, those that differ by more than "
        "doubt_above are left out",
    )


class CheckpointConfig(Strict):
    """When the run's state is saved, and which checkpoints stay on disk."""

    every_steps: int | None = Field(
        None, gt=0, description="steps between checkpoints; none: only when told to save and stop"
    )
    keep_last: int = Field(2, gt=0, description="newest checkpoints that are kept")
    keep_best: str | None = Field(
        None, description="field of the step's record by which one more checkpoint is kept"
    )
    best_is: Literal["highest", "lowest"] = "highest"
    max_disk_gb: float | None = Field(
        None,
        gt=0,
        description="bound on all kept checkpoints; the oldest go first, the newest never does",
    )


class WarmupConfig(Strict):
    """Supervised training (``python -m molt_core.sft``): the warm-up to the initial checkpoint that all arms and seeds share.

    AdamW of betas 0.9 and 0.95, without decay, gradients clipped to norm 1; ``optimizer.freeze_router`` holds here too.
    """

    steps: int = Field(150, gt=0)
    rows_per_step: int = Field(32, gt=0)
    true_label_fraction: float = Field(
        0.4, ge=0, le=1, description="share of rows with the right answer, else a random one"
    )
    lr: float = Field(1e-3, gt=0)
    seed: int = 0


class EngineConfig(Strict):
    """Generation engines (vLLM). Part of the protocol: no arm may differ here."""

    count: int = Field(1, gt=0)
    tensor_parallel: int = Field(1, gt=0)
    device: Literal["cpu", "cuda"] = "cpu"
    kv_cache_blocks: int | None = Field(
        None, gt=0, description="KV cache size in blocks; none lets vLLM choose"
    )
    max_sequences: int = Field(128, gt=0, description="most sequences decoded together")
    threads: int = Field(1, gt=0, description="CPU threads of an engine")
    placement: Literal["apart", "together"] = Field(
        "apart",
        description="engines on nodes without trainer ranks where there is room, or on theirs first",
    )
    prefix_caching: bool = Field(
        True, description="keep the keys and values of shared prompt prefixes (vLLM)"
    )


class TrainerConfig(Strict):
    """What an arm may choose: the trainer and its layout."""

    backend: str = Field(
        "fsdp2", description="fsdp2, or 'package.module:Class' of another TrainBackend"
    )
    world_size: int = Field(1, gt=0)
    micro_batch_rows: int = Field(
        64, gt=0, description="trajectories in one forward and backward pass on a rank"
    )
    max_tokens_per_micro_batch: int | None = Field(
        None,
        gt=0,
        description="tokens in one such pass, where not bounded by trajectories alone; a longer rollout passes alone",
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep only each layer's input and compute the layer again in the backward pass",
    )
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(1, gt=0, description="CPU threads of a rank")
    layout: dict[str, int] = Field(
        default_factory=dict,
        description="parallel degrees that a backend names, e.g. tensor_parallel, expert_parallel",
    )


class RunConfig(Strict):
    """One run, resolved: the protocol, the arm's trainer, the seed. ``python -m molt_core.train`` reads this as YAML."""

    model: ModelConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig | None = None
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    probe: ProbeConfig = ProbeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    warmup: WarmupConfig | None = None
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    seed: int = Field(
        0, ge=0, description="data order, task instances and request seeds; never initial weights"
    )

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        for check in CHECKS:
            check(self)
        return self

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due. The last step leaves the trained policy and none."""
        every = self.checkpoint.every_steps
        return every is not None and step % every == 0 and step < self.loop.steps

    @property
    def steps_without_policy(self) -> int:
        """First training steps in which the policy is not stepped."""
        return 0 if self.critic is None else self.critic.warmup_steps

    @property
    def trainer_processes(self) -> int:
        """Ranks of policy and critic together."""
        separate = self.critic is not None and self.critic.placement == "separate"
        return self.trainer.world_size * (1 + separate)

    @property
    def devices(self) -> int:
        """What the run works with: ranks, and devices of engines."""
        return self.trainer_processes + self.engine.count * self.engine.tensor_parallel


class _KeysOnce(yaml.SafeLoader):
    """YAML keeps the last of a key's values, and says nothing of the others: here that is an error."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(
                    f"line {line}: {name} is given twice, first in line {lines[name]}; keep one"
                )
            lines[name] = line
        return node


def load_run_config(path: str | Path) -> RunConfig:
    """Read a resolved run configuration. Raises ValueError with a line for each key at fault."""
    try:
        data = yaml.load(Path(path).read_text(), _KeysOnce)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        said = (
            (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, "))
            for e in error.errors()
        )
        raise ValueError("\n".join(": ".join(filter(None, line)) for line in said)) from error
