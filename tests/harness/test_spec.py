"""An experiment file is refused with line, key and fix, or resolved for every scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fields import known_fields
from harness.problems import SpecError
from harness.spec import load, merge
from molt_core.config import RunConfig
from molt_core.metrics import evaluation
from molt_core.types import Rollout

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
name: small
question: Is one as good as the other?
protocol:
  model: {builtin: tiny-qwen3-vl-moe}
  task: {source: shapes, variant: {shapes: 2}}
  warmup: {steps: 3}
  optimizer:
    lr: 1e-3
    eps: 1e-6
systems:
  ours:
    role: candidate
    trainer: {backend: fsdp2}
  theirs:
    role: baseline
    trainer:
      backend: fsdp2
      world_size: 2
seeds: [0, 1]
endpoints:
  - name: accuracy
    field: eval_reward_mean
    summary: at_last_step
    unit: share
    direction: higher
    scale: absolute
    margin: 0.05
    margin_reason: Nobody would notice less.
    primary: true
scales:
  here:
    default_without_slurm: true
    resources: {time_limit: 00:30:00}
  there:
    protocol:
      optimizer: {lr: 1e-5}
      task: {variant: {}}
    seeds: [4, 5, 6]
"""


def write(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in GOOD, "the test edits a line that is not there"
    path = folder / "small.yaml"
    path.write_text(GOOD.replace(old, new) if old else GOOD)
    return path


def test_a_good_file_resolves_for_every_scale(tmp_path):
    experiment = load(write(tmp_path))
    assert experiment.default_scale == "here"
    assert experiment.baseline == "theirs"
    assert experiment.scales["here"].config("theirs", seed=1).trainer.world_size == 2
    assert experiment.scales["here"].config("theirs", seed=1).seed == 1
    assert experiment.scales["there"].seeds == (4, 5, 6)


def test_a_scale_merges_sections_and_replaces_values(tmp_path):
    there = load(write(tmp_path)).scales["there"].config("ours", seed=4)
    assert (there.optimizer.lr, there.optimizer.eps) == (1e-5, 1e-6)
    assert there.task.variant == {}
    assert there.task.source == "shapes"


def test_null_is_a_value_and_not_an_absence():
    base = {"warmup": {"steps": 3}, "engine": {"kv_cache_blocks": 8}}
    patch = {"warmup": None, "engine": {"kv_cache_blocks": None}}
    assert merge(base, patch, RunConfig) == {"warmup": None, "engine": {"kv_cache_blocks": None}}


@pytest.mark.parametrize(
    ("old", "new", "at", "key", "says"),
    [
        ("    lr: 1e-3", "    learning: 1", "learning", "protocol.optimizer.learning", "known key"),
        (
            "    eps: 1e-6",
            "    ep: 1e-6",
            "ep: 1e-6",
            "protocol.optimizer.ep",
            "Did you mean `eps`?",
        ),
        ("seeds: [0, 1]", "seed: [0, 1]", "seed: [", "seed", "Did you mean `seeds`?"),
        ("    eps: 1e-6", "    eps: -1.0", "eps: -1", "protocol.optimizer.eps", "greater than 0"),
        ("    margin: 0.05\n", "", "name: accuracy", "endpoints[0].margin", "is missing"),
        (
            "    margin_reason: Nobody would notice less.\n",
            "",
            "name: accuracy",
            "endpoints[0].margin_reason",
            "one sentence: why this margin",
        ),
        (
            "      world_size: 2",
            "      world_sise: 2",
            "world_sise",
            "systems.theirs.trainer.world_sise",
            "Did you mean `world_size`?",
        ),
        (
            "    trainer: {backend: fsdp2}",
            "    trainer: {backend: fsdp2}\n    optimizer: {lr: 1}",
            "optimizer: {lr: 1}",
            "systems.ours.optimizer",
            "belongs to protocol",
        ),
        ("  warmup:", "  trainer: {}\n  warmup:", "trainer: {}", "protocol.trainer", "Move it to"),
        ("  warmup:", "  seed: 3\n  warmup:", "seed: 3", "protocol.seed", "List seeds under"),
        ("seeds: [0, 1]", "seeds: [0, 0]", "seeds: [0, 0]", "seeds", "repeats 0"),
        ("seeds: [0, 1]", "seeds: [0, 1]\nrules: {alpha: 0.4}", "rules:", "rules.alpha", "0.05"),
        ("[4, 5, 6]", "[4, 4]", "[4, 4]", "scales.there.seeds", "repeats 4"),
        (
            "    role: baseline",
            "    role: candidate",
            "systems:",
            "systems",
            "no systems with role",
        ),
        ("    role: candidate", "    role: baseline", "systems:", "systems", "2 systems with role"),
        ("    primary: true\n", "", "endpoints:", "endpoints", "no primary endpoints"),
        (
            "{time_limit: 00:30:00}",
            "{time_limit: soon}",
            "soon",
            "scales.here.resources.time_limit",
            "HH:MM:SS",
        ),
        ("lr: 1e-5", "lr: fast", "lr: fast", "protocol.optimizer.lr", "'fast'"),
        ("  ours:", "  warmup:", "  warmup:\n    role", "systems.warmup", "not a usable name"),
        (
            "    role: candidate",
            "    role: candidate\n    switch: true",
            "switch: true",
            "systems.ours.switch",
            "does not declare",
        ),
        (
            "systems:",
            "switch: engine.prefix_caching\nsystems:",
            "ours:",
            "systems.ours",
            "no value for the switch",
        ),
        ("systems:", "switch: task.source\nsystems:", "switch:", "switch", "cannot be the one"),
        (
            "seeds: [0, 1]",
            "seeds: [0, 1]\nnoise_floor: {control: {system: mine}}",
            "noise_floor",
            "noise_floor",
            "mine",
        ),
        ("  warmup: {steps: 3}\n", "", "model:", "protocol.warmup", "no weights to start from"),
        (
            "  there:",
            "  there:\n    default_without_slurm: true",
            "default_without_slurm: true\n    protocol",
            "scales.there.default_without_slurm",
            "One scale",
        ),
        (
            "    seeds: [4, 5, 6]",
            "    systems: {mine: {trainer: {}}}",
            "mine",
            "scales.there.systems.mine",
            "no system",
        ),
        (
            "fsdp2\n      world_size: 2",
            "fsdp2\n      device: cuda",
            "resources:",
            "scales.here.resources",
            "gives 0 accelerators and theirs needs 1",
        ),
        (
            "    eps: 1e-6",
            "    eps: 1e-6\n    lr: 2e-3",
            "lr: 2e-3",
            "protocol.optimizer.lr",
            "given twice",
        ),
    ],
)
def test_a_mistake_is_named_with_line_key_and_fix(tmp_path, old, new, at, key, says):
    path = write(tmp_path, old, new)
    with pytest.raises(SpecError) as refused:
        load(path)
    problem = next(p for p in refused.value.problems if p.key == key)
    expected = path.read_text()[: path.read_text().index(at) + len(at.partition("\n")[0])]
    assert problem.line == expected.count("\n") + 1
    assert says in f"{problem.what}. {problem.fix}"


def test_a_field_that_no_run_records_is_refused_with_the_nearest_names(tmp_path):
    path = write(tmp_path, "field: eval_reward_mean", "field: eval_rewrad_mean")
    with pytest.raises(
        SpecError, match=r"small.yaml:22: endpoints\[0\].field: .* Did you mean"
    ) as no:
        load(path)
    assert "`eval_reward_mean`" in str(no.value)


def test_a_part_of_a_rate_that_no_run_records_is_refused(tmp_path):
    rate = "field: {numerator: [t_step_s], denominator: [steps, tokens_forward]}"
    path = write(tmp_path, "field: eval_reward_mean", rate)
    path.write_text(path.read_text().replace("at_last_step", "total_rate"))
    with pytest.raises(SpecError) as no:
        load(path)
    assert [problem.what for problem in no.value.problems] == ["'t_step_s' is recorded by no run"]


def test_a_plug_ins_own_metric_may_be_an_endpoint(tmp_path):
    path = write(tmp_path, "field: eval_reward_mean", "field: my_clipped_share")
    path.write_text(
        path.read_text().replace("  warmup:", "  algorithm: {plugins: [mine.py]}\n  warmup:")
    )
    (tmp_path / "mine.py").write_text("def mine(t, c):\n    return t, {'my_clipped_share': t}\n")
    assert load(path, base=tmp_path).endpoints[0].field == "my_clipped_share"
    with pytest.raises(SpecError, match="my_clipped_share"):
        load(path, base=tmp_path / "elsewhere")


def test_every_field_of_a_real_evaluation_is_known():
    recorded = evaluation([Rollout("r", (), 1.0, "ok", {})] * 2, seconds=1.0)
    assert set(recorded) <= known_fields()


def test_a_validator_across_sections_is_translated(tmp_path):
    correction = "  algorithm: {correction: {level: 'off'}}\n  warmup:"
    with pytest.raises(SpecError, match="Set algorithm.correction.level: token"):
        load(write(tmp_path, "  warmup:", correction))


def test_three_primary_endpoints_are_too_many(tmp_path):
    text = GOOD.partition("scales:\n")
    endpoint = text[0].partition("endpoints:\n")[2]
    more = "".join(endpoint.replace("accuracy", f"accuracy {n}") for n in (2, 3))
    path = tmp_path / "many.yaml"
    path.write_text(text[0] + more + "".join(text[1:]))
    with pytest.raises(SpecError, match="3 primary endpoints"):
        load(path)


def test_all_mistakes_are_reported_at_once_and_each_once(tmp_path):
    path = write(tmp_path, "    lr: 1e-3", "    learning: 1")
    path.write_text(path.read_text().replace("seeds: [0, 1]", "seeds: [0, 0]"))
    with pytest.raises(SpecError) as refused:
        load(path)
    assert [problem.key for problem in refused.value.problems] == [
        "protocol.optimizer.learning",
        "seeds",
    ]


def test_scalars_follow_yaml_1_2(tmp_path):
    experiment = load(write(tmp_path, "variant: {shapes: 2}", "variant: {a: 1e-3, b: no, c: 0o7}"))
    assert experiment.scales["here"].config("ours", 0).task.variant == {
        "a": 1e-3,
        "b": "no",
        "c": "0o7",
    }
    assert experiment.scales["here"].resources.time_limit_s == 1800


def test_no_file_and_no_yaml_are_said(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("name: [1,\nquestion")
    with pytest.raises(SpecError, match=r"broken.yaml:2: is not YAML"):
        load(tmp_path / "broken.yaml")


def test_the_experiment_that_ships_resolves_at_both_scales():
    experiment = load(ROOT / "experiments" / "moe_vl.yaml")
    tiny, cluster = experiment.scales["tiny"], experiment.scales["h100x16"]
    assert experiment.default_scale == "tiny"
    assert len(tiny.seeds) >= 3
    assert cluster.config("molt", 0).model.path == "$models/Qwen/Qwen3-VL-30B-A3B-Instruct"
    assert cluster.resources.nodes * cluster.resources.devices_per_node == 16
    assert cluster.rules.validity.mismatch_p99 > tiny.rules.validity.mismatch_p99


@pytest.mark.parametrize(
    "content",
    [b"x: &a [*a]", b"x: \x00", b"? [a, b]\n: 1", b'x: !!int "abc"', b"x: caf\xe9"],
    ids=["anchor in itself", "null byte", "list as a key", "tag that does not fit", "latin-1"],
)
def test_hostile_bytes_are_refused_with_the_file_and_a_fix(tmp_path, content):
    path = tmp_path / "experiment.yaml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as refused:
        load(path)
    assert "experiment.yaml" in str(refused.value)


def test_a_name_that_ends_in_a_line_break_is_no_name(tmp_path):
    path = tmp_path / "experiment.yaml"
    text = (ROOT / "experiments" / "moe_vl.yaml").read_text()
    path.write_text(text.replace("name: moe_vl\n", 'name: "moe_vl\\n"\n', 1))
    with pytest.raises(SpecError, match="name"):
        load(path)
