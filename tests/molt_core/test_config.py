"""A run that cannot be honest is refused before it starts, with the key at fault and what to set it to."""

import pytest
from pydantic import ValidationError

from molt_core.algo.config import (
    CORRECTION_SCHEMES,
    ESTIMATORS,
    LOSSES,
    AlgorithmConfig,
    KLConfig,
)
from molt_core.config import RunConfig, load_run_config

BASE = {"model": {"builtin": "tiny-qwen3-vl-moe"}, "task": {"source": "shapes"}}


def refused(changes: dict, match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        RunConfig.model_validate(BASE | changes)


def test_the_least_configuration_is_complete():
    assert RunConfig.model_validate(BASE).loop.max_staleness == 1


def test_off_policy_data_without_correction_is_refused():
    off = {"algorithm": {"correction": "off"}}
    refused(off | {"loop": {"max_staleness": 1}}, "off-policy data without correction")
    RunConfig.model_validate(BASE | off | {"loop": {"max_staleness": 0}})


def test_trainer_and_engine_of_different_numerics_without_correction_are_refused():
    off = {"algorithm": {"correction": "off"}, "loop": {"max_staleness": 0}}
    model = {"model": {"builtin": "tiny-qwen3-vl-moe", "dtype": "bfloat16"}}
    refused(off | model, "makes trainer and engine two different policies")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"proximal": "rollout"}, "already divides by the behaviour policy"),
        (
            {"proximal": "rollout", "correction": "off", "loss": "policy_gradient"},
            "has no ratio to a proximal policy",
        ),
        (
            {"proximal": "rollout", "correction": "off", "kl": {"coef": 0.1}},
            "corrects the clipped ratio alone",
        ),
        ({"advantage": "on_policy_distillation"}, "set algorithm.teacher"),
        ({"teacher": "folder"}, "algorithm.teacher is not read by algorithm.advantage: grpo"),
        ({"dual_clip": 3.0, "loss": "gspo"}, "dual_clip is not read by algorithm.loss: gspo"),
        ({"gamma": 0.9}, "gamma is not read by algorithm.advantage: grpo"),
        (
            {"gae_lambda": 0.9, "advantage": "reinforce_pp"},
            "gae_lambda is not read by algorithm.advantage: reinforce_pp",
        ),
        ({"clip_low": 0.1, "loss": "cispo"}, "clip_low is not read by algorithm.loss: cispo"),
        ({"clip_high": 0.1, "loss": "policy_gradient"}, "clip_high is not read by .*_gradient"),
        ({"clip_low": 1.5}, "less than or equal to 1"),
        ({"dual_clip": 1.2, "clip_high": 0.28}, "must lie above"),
        ({"aggregation": "constant"}, "aggregation_length"),
        ({"aggregation_length": 8}, "go together"),
        (
            {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}},
            "is not read by algorithm.advantage: grpo",
        ),
    ],
)
def test_an_algorithm_that_trains_something_else_than_it_says_is_refused(changes, match):
    with pytest.raises(ValidationError, match=match):
        AlgorithmConfig.model_validate(changes)


@pytest.mark.parametrize(
    ("kl", "match"),
    [
        ({"place": "reward", "estimator": "k3"}, "set estimator: k1"),
        ({"place": "reward", "estimator": "k2"}, "set estimator: k1"),
        ({"place": "loss", "estimator": "k1"}, "set estimator: k2 or k3"),
        ({"place": "reward", "estimator": "k1", "base": "behaviour"}, "set base: reference"),
    ],
)
def test_a_penalty_without_the_gradient_of_a_penalty_is_refused(kl, match):
    with pytest.raises(ValidationError, match=match):
        KLConfig.model_validate({"coef": 0.1, **kl})


@pytest.mark.parametrize(
    ("kl", "match"),
    [
        ({"target": 0.01}, "0 stays 0; set algorithm.kl.coef"),
        ({"coef": 0.1, "target": 0.01, "base": "behaviour"}, "set base: reference"),
        ({"coef": 0.1, "gain": 0.2}, "gain is not read without algorithm.kl.target"),
        ({"coef": 0.1, "target": 0.0}, "greater than 0"),
        ({"coef": 0.1, "target": 0.01, "gain": 5.0}, "less than or equal to 1"),
    ],
)
def test_a_target_that_would_steer_nothing_is_refused(kl, match):
    with pytest.raises(ValidationError, match=match):
        KLConfig.model_validate(kl)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"critic": None}, "gae needs a critic; add a section critic"),
        ({"algorithm": {"advantage": "grpo"}}, "critic is not read by algorithm.advantage: grpo"),
        ({"trainer": {"backend": "harness:Other"}}, "colocated needs trainer.backend: fsdp2"),
        ({"critic": {"clip": 0.2}}, "no effect with critic.steps_per_batch: 1"),
        ({"critic": {"warmup_steps": 9}, "loop": {"steps": 9}}, "leaves the policy none"),
    ],
)
def test_a_critic_that_is_not_trained_as_it_says_is_refused(changes, match):
    refused({"algorithm": {"advantage": "gae"}, "critic": {}} | changes, match)


@pytest.mark.parametrize("option", [{"clip_low": 0.1}, {"clip_high": 0.1}, {"dual_clip": 3.0}])
def test_a_clip_of_a_ratio_that_is_always_one_is_refused(option):
    refused({"algorithm": option}, f"{[*option][0]} has no effect with algorithm.proximal: current")
    acts = {"proximal": "rollout", "correction": "off", **option}
    RunConfig.model_validate(BASE | {"algorithm": acts})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"algorithm": {"advantage": "flash_reinforce"}, "rollout": {"samples_per_prompt": 1}},
            "drops every group of one sample",
        ),
        (
            {"algorithm": {"advantage": "on_policy_distillation", "teacher": "folder"}},
            "equal rewards, which algorithm.advantage: on_policy_distillation learns from",
        ),
    ],
)
def test_a_filter_that_drops_for_nothing_is_refused(changes, match):
    rollout = {"rollout": {"drop_zero_variance": True, **changes.get("rollout", {})}}
    refused(changes | rollout, match)


@pytest.mark.parametrize("name", [{"advantage": "gpro"}, {"loss": "clip"}])
def test_an_unknown_name_is_refused_unless_a_file_may_register_it(name):
    refused({"algorithm": name}, "is unknown; choose one of .*algorithm.plugins")
    RunConfig.model_validate(BASE | {"algorithm": name | {"plugins": ["mine.py"]}})


def test_the_names_that_are_built_in_are_those_that_are_registered():
    from molt_core.algo import advantages, losses

    for module, registry, names in (
        (advantages, advantages._ESTIMATORS, ESTIMATORS),
        (losses, losses._LOSSES, LOSSES),
    ):
        own = (n for n, f in registry._functions.items() if f.__module__ == module.__name__)
        assert sorted(own) == sorted(names)


def test_another_trainer_may_have_a_critic_in_processes_of_its_own():
    own = {"algorithm": {"advantage": "gae"}, "critic": {"placement": "separate"}}
    config = RunConfig.model_validate(
        BASE | own | {"trainer": {"backend": "harness:Other", "world_size": 3}}
    )
    assert config.trainer_processes == 6
    assert RunConfig.model_validate(BASE | {"trainer": {"world_size": 3}}).trainer_processes == 3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"optimizer": {"warmup_steps": 9, "schedule": "cosine"}, "loop": {"steps": 9}},
            "cosine never begins: optimizer.warmup_steps is 9 of loop.steps 9",
        ),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "less than 1"),
    ],
)
def test_a_length_that_is_never_reached_is_refused(changes, match):
    changes = {key: {**BASE.get(key, {}), **value} for key, value in changes.items()}
    refused(changes, match)


def test_a_penalty_against_the_policy_that_is_stepped_is_refused():
    kl = {"algorithm": {"kl": {"coef": 0.1, "base": "behaviour"}}}
    refused(kl | {"loop": {"max_staleness": 0}}, "has no effect with loop.max_staleness: 0")
    RunConfig.model_validate(BASE | kl | {"loop": {"max_staleness": 1}})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"low": 3.0, "mode": "mask"}, "swap them"),
        ({"low": 0.5}, "truncate has no lower bound"),
        ({"level": "geometric"}, "the importance weight of no sample"),
        ({"mode": "mask", "low": 2.0, "high": 5.0}, "leave out the ratio 1"),
        ({"high": 0.5}, "leave out the ratio 1"),
        ({"truncate_kept": 2.0}, "bounds what a mask keeps"),
        ({"gate": "tv", "high": 0.2}, "a divergence and no weight"),
        ({"gate": "tv", "mode": "mask", "level": "geometric", "high": 0.2}, "level: sequence"),
        (
            {"gate": "binary_kl", "mode": "mask", "low": 0.1, "high": 0.2},
            "low would drop just those",
        ),
        ({"gate": "tv", "mode": "mask", "high": 2.0}, "set it below 1"),
        ("tiss", "choose one of .*'tis'"),
    ],
)
def test_a_correction_without_a_meaning_is_refused(fields, match):
    with pytest.raises(ValidationError, match=match):
        AlgorithmConfig.model_validate({"correction": fields})


@pytest.mark.parametrize("name", CORRECTION_SCHEMES)
def test_a_named_scheme_stands_for_its_fields(name):
    named, spelled = (
        AlgorithmConfig.model_validate({"correction": c}).correction
        for c in (name, CORRECTION_SCHEMES[name])
    )
    assert named == spelled
    assert AlgorithmConfig.model_validate({"correction": named.model_dump()}).correction == named


def test_the_policies_that_a_run_must_load():
    reference, behaviour = KLConfig(coef=0.1), KLConfig(coef=0.1, base="behaviour")
    assert AlgorithmConfig().frozen_policies == ()
    assert AlgorithmConfig(kl=behaviour).frozen_policies == ()
    assert AlgorithmConfig(kl=reference).frozen_policies == ("reference",)
    distillation = AlgorithmConfig(advantage="on_policy_distillation", teacher="folder")
    assert distillation.frozen_policies == ("teacher",)


def test_a_group_baseline_of_one_sample_is_refused():
    refused({"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt to 2 or more")


@pytest.mark.parametrize("model", [{}, {"builtin": "tiny-qwen3-vl-moe", "path": "folder"}])
def test_a_model_has_one_source(model):
    refused({"model": model}, "exactly one of model.builtin and model.path")


def test_an_unknown_key_is_refused():
    refused({"loop": {"max_stalenes": 1}}, "max_stalenes")


EVERY = {"loop": {"steps": 50}, "evaluation": {"every": 20}, "probe": {"every": 10}}
CRITIC = {"algorithm": {"advantage": "gae"}, "critic": {}}


@pytest.mark.parametrize(
    ("best", "every", "more", "said"),
    [
        ("eval_reward_mean", 30, {}, "every 20 steps, and no checkpoint before the last of 50"),
        ("mismatch_p99", 25, {}, "every 10 steps, and no checkpoint before the last of 50"),
        ("acuracy", 20, {}, "no number that a run records"),
        ("eval_reward_maen", 20, {}, "e.g. eval_reward_mean"),
        ("phase", 20, {}, "no number"),
        ("lag_histogram", 20, {}, "no number"),
        ("value_loss", 20, {}, "is recorded with a critic, which"),
        ("value_clip_fraction", 20, CRITIC, "is recorded with `critic.clip`, which"),
        ("kl_reference", 20, {}, "is recorded with a reference, which"),
        ("importance_masked", 20, {}, "is recorded `mode: mask`, which"),
        ("eval_reward_mean", None, {}, "not read without checkpoint.every_steps"),
    ],
)
def test_a_best_checkpoint_that_no_record_would_tell_is_refused(best, every, more, said):
    refused(EVERY | more | {"checkpoint": {"every_steps": every, "keep_best": best}}, said)


def test_a_direction_of_what_is_best_is_not_read_by_itself():
    refused({"checkpoint": {"best_is": "lowest"}}, "not read without checkpoint.every_steps")


@pytest.mark.parametrize(
    ("best", "more"),
    [
        ("eval_reward_mean", {}),
        ("mismatch_p99", {}),
        ("reward_mean", {}),
        ("value_loss", CRITIC),
        ("importance_truncated", {"algorithm": {"correction": "tis"}}),
        ("pushed_down_fraction", {"algorithm": {"plugins": ["mine.py"]}}),
    ],
)
def test_a_best_checkpoint_that_records_tell_is_accepted(best, more):
    checkpoint = {"checkpoint": {"every_steps": 40, "keep_best": best, "best_is": "lowest"}}
    RunConfig.model_validate(BASE | EVERY | more | checkpoint)


def test_replaying_routes_that_no_engine_records_is_refused_before_the_run():
    replayed = {"model": BASE["model"] | {"routing_replay": True}}
    refused(replayed | {"engine": {"prefix_caching": False}}, "set engine.prefix_caching: true")
    RunConfig.model_validate(BASE | replayed)


def test_a_key_that_comes_in_by_a_merge_and_is_overridden_is_given_once(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {builtin: tiny-qwen3-vl-moe}\ntask:\n  source: shapes\n  variant:\n"
        "    <<: {<<: {colors: 3, squares: 2}, squares: 4}\n    colors: 5\n"
    )
    assert load_run_config(file).task.variant == {"colors": 5, "squares": 4}
