"""What a run's processes import at their start, and what its command refuses before it starts any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml
from PIL import Image

from molt_core.algo.config import AlgorithmConfig
from molt_core.config import load_run_config
from molt_core.data import DataError
from molt_core.divergence import Diverged
from molt_core.metrics import RunWriter, attempts_made
from molt_core.train import __main__ as command_line

EXAMPLE = Path(__file__).parents[2] / "molt_core" / "example.yaml"


def test_the_driver_pays_for_no_model_code():
    """torch and Ray are a second; transformers, FSDP2 and vLLM are five, and only actors need them."""
    program = (
        "import sys, molt_core.train.__main__\n"
        "print(*{'transformers', 'vllm', 'torch.distributed.fsdp', 'torch._dynamo'} & sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def model_of(model_type: str, folder: Path) -> str:
    """A model's folder as far as the command looks into it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(folder)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs the command on the example with changes; returns what it says when it starts nothing and ends with 2."""

    def run(changes: dict, *arguments: str) -> str:
        data = yaml.safe_load(EXAMPLE.read_text())
        for key, value in changes.items():
            data.pop(key) if value is None else data.update({key: value})
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(data))
        monkeypatch.setattr(command_line, "start_ray", lambda places: pytest.fail("it started"))
        given = [str(config), "--run-dir", str(tmp_path / "run"), *arguments]
        assert command_line.main(given) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    return run


def test_a_policy_whose_warm_up_nobody_made_is_refused(refused):
    assert "python -m molt_core.sft CONFIG --out FOLDER" in refused({})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "make it with python -m molt_core.models.tiny tiny-qwen3-vl-moe FOLDER"),
        ({"model": {"path": "nowhere"}}, "model.path: nowhere is not a Hugging Face"),
        ({"trainr": {}}, "trainr"),
        ({"task": {"source": "nope.jsonl"}}, "task.source: nope.jsonl is neither"),
        ({"task": {"source": "shapes", "variant": {"question": "big"}}}, "task.variant.question"),
        ({"task": {"source": "shapes", "agent": "no.such:Thing"}}, "task.agent: 'no.such:Thing' c"),
        ({"task": {"source": "shapes", "agent": "json:Thing"}}, "task.agent: 'json:Thing' cannot"),
        (
            {"trainer": {"backend": "json:Thing"}},
            "trainer.backend: 'json:Thing' cannot be imported",
        ),
        (
            {"algorithm": {"advantage": "on_policy_distillation", "teacher": "nowhere"}},
            "algorithm.teacher: nowhere is not a Hugging Face",
        ),
        (
            {"algorithm": {"advantage": "gae"}, "critic": {"path": "nowhere"}},
            "critic.path: nowhere is not a Hugging Face",
        ),
    ],
)
def test_what_the_configuration_has_wrong_is_named_before_anything_starts(refused, changes, said):
    assert said in refused({"warmup": None, **changes})


def test_a_picture_that_cannot_be_decoded_is_named_before_anything_starts(refused, tmp_path):
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    row = {"prompt": "what?", "answer": "red", "images": ["cut.png"]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(row) + "\n") * 3)
    said = refused({"warmup": None, "task": {"source": str(rows), "eval_items": 1}})
    assert f"{rows}, line 1: images[0] (cut.png): cannot be decoded" in said


def test_data_that_fail_later_have_a_reason():
    wrapped = ray.exceptions.RayTaskError("rollout", "", DataError("rows.jsonl, line 3: gone"))
    for error in (wrapped, wrapped.cause):
        assert command_line.reason_of(error) == "DATA"


def test_a_folder_without_a_model_is_named_before_anything_starts(refused, tmp_path):
    assert f"--checkpoint: {tmp_path} is not a" in refused({}, "--checkpoint", str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {builtin: [", "not YAML: "),
        ("model:\n\tbuiltin: x", "not YAML: "),
        (
            "loop: {max_staleness: 0}\nmodel: {builtin: tiny-qwen3-vl-moe}\nloop: {steps: 700}",
            "line 3: loop is given twice, first in line 1",
        ),
        ("loop:\n  steps: 5\n  steps: 7", "line 3: steps is given twice, first in line 2"),
        ("", "valid dictionary"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, capsys, text, said):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert command_line.main([str(config), "--run-dir", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on the example, with ``train`` in place of what a run does; returns its exit code."""
    monkeypatch.setattr(command_line, "start_ray", lambda places: None)
    policy = Path(model_of("qwen3_vl_moe", tmp_path / "policy"))
    monkeypatch.setattr(command_line, "initial_policy", lambda *arguments: policy)
    arguments = [str(EXAMPLE), "--run-dir", str(tmp_path / "run"), "--attempt", "1"]

    def run(train) -> int:
        monkeypatch.setattr(command_line, "train", train)
        return command_line.main(arguments)

    return run


async def _succeeds(loop) -> bool:
    return True


async def _diverges(loop) -> bool:
    raise Diverged("step 7: loss nan")


def test_a_reason_is_gone_when_the_same_attempt_succeeds(run, tmp_path):
    reason = tmp_path / "run" / "attempts" / "01" / "reason.json"
    assert run(_diverges) == 3 and reason.exists()
    assert run(_succeeds) == 0 and not reason.exists()


@pytest.mark.parametrize(("steps", "begins"), [(80, False), (40, True)])
def test_a_finished_run_is_left_as_it_is(run, tmp_path, capsys, steps, begins):
    """The example has 80 steps: a run that was told of fewer goes on to them."""
    writer = RunWriter(tmp_path / "run", 1, steps)
    writer.policy_folder.mkdir(parents=True)
    (writer.policy_folder / "config.json").write_text("{}")
    writer.heartbeat("training", steps)
    began = []

    async def train(loop) -> bool:
        began.append(loop)
        return True

    assert run(train) == 0 and len(began) == 1  # not finished: it may have no policy of its own yet
    writer.heartbeat("finished", steps)
    assert run(train) == 0 and len(began) == 1 + begins
    finished = (
        f"finished already: the trained policy is {writer.policy_folder}" in capsys.readouterr().out
    )
    assert finished is not begins


def test_a_folder_is_one_runs_and_one_process_s_at_a_time(tmp_path):
    config = load_run_config(EXAMPLE)
    longer = config.model_copy(update={"loop": config.loop.model_copy(update={"steps": 500})})
    held = command_line.take(tmp_path, config)
    with pytest.raises(ValueError, match="another process trains there"):
        command_line.take(tmp_path, config)
    held.close()
    command_line.take(tmp_path, longer).close()
    other = config.model_copy(update={"seed": 1, "algorithm": AlgorithmConfig(loss="gspo")})
    with pytest.raises(ValueError, match="a run with another algorithm, seed: give another folder"):
        command_line.take(tmp_path, other)


def test_attempts_are_counted_by_their_folders(tmp_path):
    assert attempts_made(tmp_path) == 0
    for name in ("01", "02", "11", "notes"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert attempts_made(tmp_path) == 11


def test_pictures_for_a_policy_of_text_are_refused(refused, tmp_path):
    folder = model_of("qwen3_moe", tmp_path / "policy")
    said = refused({"warmup": None, "model": {"path": folder}})
    assert f"task.variant.question: 'larger': it shows images, and model ({folder}) is a" in said
    assert "qwen3_moe, which reads text alone; take a vision-language model" in said


def test_the_first_row_with_images_is_named(refused, tmp_path):
    rows = [{"prompt": "red?", "answer": "red"} for _ in range(4)]
    Image.new("RGB", (16, 16)).save(tmp_path / "square.png")
    rows[2]["images"] = ["square.png"]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"path": model_of("qwen3_moe", tmp_path / "policy")}
    task = {"source": str(data), "eval_items": 1}
    said = refused({"warmup": None, "model": model, "task": task})
    assert f"{data}, line 3, images: it shows images" in said


def test_a_teacher_of_text_for_a_policy_that_sees_is_refused(refused, tmp_path):
    model = {"path": model_of("qwen3_vl_moe", tmp_path / "policy")}
    teacher = model_of("qwen3_moe", tmp_path / "teacher")
    algorithm = {"advantage": "on_policy_distillation", "teacher": teacher, "correction": "tis"}
    said = refused({"warmup": None, "model": model, "algorithm": algorithm})
    assert f"algorithm.teacher ({teacher}) is a qwen3_moe" in said
