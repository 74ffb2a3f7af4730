"""What is a secret, and that none is in any file of a run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cluster import Cluster, Container, load_cluster
from harness.container import launch
from harness.problems import SpecError
from harness.redaction import is_secret_name, redact, refused
from harness.run_folder import read_json, write_json
from harness.sbatch import Task
from harness.slurm import submit_arrays
from harness.source import read
from harness.tracking import Tracker
from harness.why import account

TOKEN = "hf_0123456789abcdefPLANTED"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "WANDB_API_KEY", "GEMINI_KEY", "db_password")),
        *((name, True) for name in ("AWS_SECRET_ACCESS_KEY", "api_key", "MLFLOW_TRACKING_TOKEN")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "max_new_tokens")),
        *((name, False) for name in ("key", "sort_key", "KEYBOARD", "NCCL_DEBUG")),
    ],
)
def test_a_secret_is_told_by_its_name(name, secret):
    assert is_secret_name(name) is secret


@pytest.mark.parametrize(
    "lines",
    [
        "environment:\n  HF_TOKEN: hunter2",
        "setup:\n  - export WANDB_API_KEY=0a1b2c3d",
        "container:\n  arguments: [--env, 'DB_PASSWORD=hunter2']",
        "sbatch:\n  comment: see https://me:hunter2@lab.example/",
        f"environment:\n  GREETING: {TOKEN}",
        "environment:\n  MOLT_NOTIFY: https://hooks.example/T0/B0/x",
        "setup:\n  - export MOLT_NOTIFY=https://hooks.example/T0/B0/x",
        "environment:\n  DB_PASSWORD: hunter2 horse battery",
        "environment:\n  DB_PASSWORD: $hunter2!pass99",
        "environment:\n  AWS_SECRET_ACCESS_KEY: /hunter2abcdef",
        "environment:\n  PGPASSWORD: hunter2",
        "environment:\n  MYSQL_PWD: hunter2",
    ],
)
def test_a_secret_in_a_yaml_is_refused_with_file_line_key_and_way_out(tmp_path, lines):
    path = tmp_path / "here.yaml"
    path.write_text(f"{lines}\n")
    with pytest.raises(SpecError) as error:
        load_cluster(path)
    said = str(error.value)
    key = lines.partition(":")[0]
    assert said.startswith((f"{path}:2: {key}", f"{path}:3: {key}"))
    assert "has a secret in it" in said and "Name the variable without a value" in said
    assert not any(word in said for word in ("hunter2", "0a1b2c3d", TOKEN))


def test_an_experiment_that_repeats_a_variable_of_this_shell_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    path = tmp_path / "small.yaml"
    path.write_text("protocol: {task: {variant: {judge: 'as correct-horse-battery'}}}\n")
    with pytest.raises(SpecError, match=r"small.yaml:1: protocol.task.variant.judge: has a secret"):
        read(path)


def test_a_name_without_a_value_and_references_are_no_secrets(tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text(
        "environment: {HF_TOKEN: , HF_TOKEN_PATH: /home/me/token, NCCL_DEBUG: WARN}\n"
        "setup: ['export DB_PASSWORD=$(cat ~/.password)', 'export API_KEY=$OTHER', 'export HF_TOKEN=`cat ~/.hf`']\n"
    )
    profile = load_cluster(path)
    assert profile.passed == ("HF_TOKEN",)
    assert profile.exports == {"HF_TOKEN_PATH": "/home/me/token", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPENAI_API_KEY", "EMPTY"),  # what clients of a vLLM of one's own are given
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true"),
        ("X_MAX_TOKEN", "32768"),
        ("api_key_env", "OPENAI_API_KEY"),
        ("pad_token", "[PAD]"),
        ("token_level", "mean"),
        ("question", "is token=prompt better?"),
    ],
)
def test_honest_values_under_such_names_are_none(name, value):
    assert not refused(name, value)


def test_a_word_of_the_own_paths_is_kept_in_records(monkeypatch):
    """On many object stores the access key is the login."""
    login = Path.home().name if len(Path.home().name) >= 8 else "someone-here"
    monkeypatch.setenv("HOME", f"/home/{login}")
    for name in ("STORE_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, login)
        assert redact({"image": f"/home/{login}/molt.sif"}) == {"image": f"/home/{login}/molt.sif"}
        monkeypatch.delenv(name)


def test_a_tokenizers_token_is_no_secret(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text("variant: {stop_token: 151645, eos_token: <|im_end|>, hide_token: false}\n")
    assert read(path).data["variant"]["stop_token"] == 151645


def test_records_have_the_name_in_the_place_of_the_value_and_numbers_as_they_were(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SOME_API_KEY", "12345678")
    said = {"why": "401 for 12345678", "uri": "https://me:pw@host/x", "loss": 0.12345678}
    write_json(tmp_path / "end.json", said)
    expected = {"why": "401 for [SOME_API_KEY]", "uri": "https://[user]@host/x", "loss": 0.12345678}
    assert read_json(tmp_path / "end.json") == expected
    assert (
        redact("git@host:me/code.git, s3://bucket/a@2") == "git@host:me/code.git, s3://bucket/a@2"
    )


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_containers_launch_line_names_what_it_passes_and_has_no_value(monkeypatch, runtime):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    profile = Cluster(environment={"HF_TOKEN": None, "GREETING": "hello"})
    box = Container(runtime=runtime, image="/images/a")
    line = launch(box, ["true"], variables=profile.exports, passed=profile.passed)
    assert "GREETING=hello" in line and TOKEN not in " ".join(line)
    assert ("--container-env=HF_TOKEN" in line) is (runtime == "pyxis")


def test_what_a_program_prints_is_in_its_log_alone(make_run, job_command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = make_run(body="raise ValueError('401 for ' + os.environ['HF_TOKEN'])")
    write_json(folder.path.parent / "queue.json", {"order": [folder.name], "work": {}})
    subprocess.run(job_command(folder), check=False)
    assert folder.end["reason"] == "FAILED: exit code 1: ValueError: 401 for [HF_TOKEN]"
    told = account(folder)
    assert told.error[-1] == "ValueError: 401 for [HF_TOKEN]" and TOKEN not in str(told)
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert [path.name for path in files if TOKEN in path.read_text()] == ["output.log"]


def test_a_secret_in_a_runs_own_reason_goes_from_the_record(make_run, job_command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    body = "facts = {'reason': 'ENGINE', 'detail': '401 for ' + os.environ['HF_TOKEN']}\n"
    body += "open('reason.json', 'w').write(json.dumps(facts))\nraise SystemExit(3)"
    folder = make_run(body=body)
    subprocess.run(job_command(folder), check=False)
    assert folder.end["reason"] == "ENGINE: 401 for [HF_TOKEN]"
    said = (folder.attempts[0] / "reason.json").read_text()
    assert "401 for [HF_TOKEN]" in said and TOKEN not in said


APPTAINER = '#!/bin/sh\nwhile [ "$1" != "$IMAGE" ]; do shift; done; shift; exec "$@"\n'
USES_IT = """
import hashlib
(run / "used").write_text(hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest())
"""


def test_no_file_of_a_run_has_a_secret_that_the_run_uses(
    lab, store, planned, job_command, tmp_path, monkeypatch
):
    """Batch scripts, records, launch line, store: after a submit to a stand-in Slurm and a job in a stand-in container."""
    secret = "hf_0123456789abcdefPLANTED"
    image = tmp_path / "a.sif"
    image.write_text("image")
    for name, value in {"HF_TOKEN": secret, "IMAGE": str(image)}.items():
        monkeypatch.setenv(name, value)
    (lab / "apptainer").write_text(APPTAINER)
    (lab / "apptainer").chmod(0o755)
    profile = tmp_path / "here.yaml"
    box = f"{{runtime: apptainer, image: {image}, python: {sys.executable}}}"
    profile.write_text(f"environment: {{HF_TOKEN: , GREETING: hello}}\ncontainer: {box}\n")
    folder = planned(body=USES_IT + "sys.exit('401')\n")
    sha256 = hashlib.sha256(b"image").hexdigest()
    folder.update_run(image={"path": str(image), "sha256": sha256})
    submit_arrays(folder.path.parent, [Task.of(folder)], load_cluster(profile))
    subprocess.run(job_command(folder), check=False)
    Tracker(folder.path.parent, store).sync()

    assert (folder.path / "used").read_text() == hashlib.sha256(secret.encode()).hexdigest()
    assert "GREETING=hello" in (folder.attempts[-1] / "start.json").read_text()
    written = [p for p in folder.path.parents[2].rglob("*") if p.is_file()]
    written += [*Path(store.removeprefix("sqlite:///")).parent.iterdir(), *lab.glob("*.sh")]
    assert {p.suffix for p in written} >= {".sh", ".json", ".db", ".pkl"}
    assert [str(p) for p in written if secret.encode() in p.read_bytes()] == []
