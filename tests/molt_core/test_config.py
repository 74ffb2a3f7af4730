"""A run that cannot be honest is refused before it starts, with the key at fault and what to set it to."""

import pytest
from pydantic import ValidationError

from molt_core.config import AlgorithmConfig, RunConfig

BASE = {"model": {"builtin": "tiny-qwen3-vl-moe"}, "task": {"source": "shapes"}}


def refused(changes: dict, match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        RunConfig.model_validate(BASE | changes)


def test_the_least_configuration_is_complete():
    assert RunConfig.model_validate(BASE).loop.max_staleness == 1


def test_off_policy_data_without_correction_is_refused():
    off = {"algorithm": {"correction": {"level": "off"}}}
    refused(off | {"loop": {"max_staleness": 1}}, "off-policy data without correction")
    RunConfig.model_validate(BASE | off | {"loop": {"max_staleness": 0}})


def test_correcting_twice_is_refused():
    with pytest.raises(ValidationError, match="already divides by the behaviour policy"):
        AlgorithmConfig(proximal="rollout")


def test_a_group_baseline_of_one_sample_is_refused():
    refused({"rollout": {"samples_per_prompt": 1}}, "samples_per_prompt to 2 or more")


@pytest.mark.parametrize("model", [{}, {"builtin": "tiny-qwen3-vl-moe", "path": "folder"}])
def test_a_model_has_one_source(model):
    refused({"model": model}, "exactly one of model.builtin and model.path")


def test_an_unknown_key_is_refused():
    refused({"loop": {"max_stalenes": 1}}, "max_stalenes")
