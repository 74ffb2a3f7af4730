"""Launch lines of containers, and the image's hash. The lines are run for real in tests/slurm/test_container.py."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess

import pytest

from harness import container
from harness.cluster import Cluster, Container, load_cluster
from harness.container import Image, command_pid, known_image, launch, own_code
from harness.expand import expand
from harness.identity import ROOT
from harness.problems import SpecError
from harness.run_folder import write_json
from harness.spec import load
from tests.harness.test_spec import write

APPTAINER = Container(runtime="apptainer", image="/images/a.sif", mounts=("/data", "/a:/b:ro"))
PYXIS = APPTAINER.model_copy(update={"runtime": "pyxis", "arguments": ("--container-writable",)})


def test_apptainers_line():
    made = launch(
        APPTAINER, ["python", "x.py"], mounts=["/runs"], workdir="/w", variables={"A": "b c"}
    )
    expected = "apptainer exec --nv --no-home --bind /data:/data --bind /a:/b:ro --bind /runs:/runs --pwd /w"
    assert made == [*expected.split(), "/images/a.sif", "env", "A=b c", "python", "x.py"]


def test_pyxis_line():
    made = launch(PYXIS, ["python", "x.py"], workdir="/w", cpus=96)
    expected = (
        "srun --nodes=1 --ntasks=1 --relative=0 --overlap --mem=0 --cpus-per-task=96 --cpu-bind=none"
        " --container-image=/images/a.sif --container-mounts=/data:/data,/a:/b:ro --container-workdir=/w"
        " --no-container-mount-home --no-container-entrypoint --no-container-remap-root --container-writable"
        " python x.py"
    )
    assert made == expected.split()


def test_without_a_container_a_command_is_itself():
    assert launch(Container(), ["python", "x.py"]) == ["python", "x.py"]


def test_a_place_that_a_runtime_would_read_as_two_is_refused():
    with pytest.raises(ValueError, match=r"/data,b cannot be mounted"):
        launch(PYXIS, ["true"], mounts=["/data,b"])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("runtime: pyxis\n  image: molt.sqsh", "image molt.sqsh is no absolute path"),
        ("runtime: apptainer", "image None is no absolute path"),
        ("mounts: [data]", "data is no mount. Write SOURCE, SOURCE:TARGET"),
        ("mounts: ['/data:/data:rw']", "/data:/data:rw is no mount"),
        ("mounts: ['/data:data']", "/data:data is no mount"),
    ],
)
def test_a_wrong_container_is_refused_with_its_line(tmp_path, lines, said):
    path = tmp_path / "here.yaml"
    path.write_text(f"container:\n  {lines}\n")
    with pytest.raises(SpecError) as error:
        load_cluster(path)
    first = str(error.value).splitlines()[0]
    assert first.startswith((f"{path}:1: container", f"{path}:2: container")) and said in first


def test_an_image_is_hashed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    file, runs = tmp_path / "a.sif", tmp_path / "runs"
    box = Container(runtime="apptainer", image=str(file))
    file.write_bytes(b"first")
    sha256 = hashlib.sha256(b"first").hexdigest()
    assert known_image(box, runs) == Image(str(file), sha256)
    with monkeypatch.context() as patched:
        patched.setattr(container, "hash_path", None)
        assert known_image(box, runs).sha256 == sha256
    before = file.stat().st_mtime_ns
    file.write_bytes(b"other")
    os.utime(file, ns=(before, before))  # of the same size and time: as `cp -p` leaves it
    assert known_image(box, runs).sha256 == hashlib.sha256(b"other").hexdigest()


def test_another_image_is_another_run(tmp_path):
    experiment = load(write(tmp_path))
    made = [
        expand(experiment, "here", tmp_path / "runs", base=tmp_path, write=False, image=image)
        for image in (None, Image("/a", "0" * 64), Image("/a", "1" * 64), Image("/b", "1" * 64))
    ]
    first, second, third, moved = ([run.identity for run in e.runs] for e in made)
    assert all(len({*ids}) == 3 for ids in zip(first, second, third))
    assert moved == third  # where the file lies changes no result


@pytest.mark.parametrize(
    ("content", "runtime", "said"),
    [
        ("other", "apptainer", "changed after the submit; put it back or submit again"),
        ("image", "none", "its job's profile has none"),
        (None, "apptainer", "is no file here"),
    ],
)
def test_a_run_starts_in_the_image_it_was_submitted_with_or_not_at_all(
    make_run, job_command, tmp_path, content, runtime, said
):
    file, folder = tmp_path / "a.sif", make_run()
    if content is not None:
        file.write_text(content)
    box = Container(runtime=runtime, image=str(file))
    profile = Cluster(container=box).model_dump(mode="json")
    write_json(folder.path.parent / "cluster.json", profile)
    sha256 = hashlib.sha256(b"image").hexdigest()
    folder.update_run(image={"path": str(file), "sha256": sha256})
    assert subprocess.run(job_command(folder), capture_output=True).returncode == 1
    assert folder.end["state"] == "CONFIG" and said in folder.end["reason"]


def test_a_signal_goes_to_the_command_inside_where_its_number_means_it(tmp_path):
    assert command_pid(tmp_path, 7) == 7  # nothing is known of it yet
    own = os.readlink("/proc/self/ns/pid")
    write_json(tmp_path / "inside.json", {"pid": 42, "pid_namespace": own})
    assert command_pid(tmp_path, 7) == 42
    write_json(tmp_path / "inside.json", {"pid": 42, "pid_namespace": "pid:[1]"})
    assert command_pid(tmp_path, 7) == 7  # another process bears that number here


def test_a_runtime_says_by_its_exit_code_which_signal_ended_the_command():
    """The convention of shells, srun and apptainer; 75 and 255 are codes of the command's own."""
    killed = subprocess.run(["sh", "-c", "sh -c 'kill -9 $$'; exit $?"]).returncode
    assert (own_code(killed), own_code(75), own_code(255)) == (-signal.SIGKILL, 75, 255)


def test_the_recipes_of_the_image_agree_and_name_no_registry():
    """One base, by tag and by a digest that has to be given; Python packages from the lock alone."""
    recipe = (ROOT / "containers" / "Dockerfile").read_text()
    definition = (ROOT / "containers" / "molt.def").read_text()
    tag = re.search(r"^FROM nvidia/cuda:(\S+)@\$\{BASE_DIGEST\}$", recipe, re.MULTILINE).group(1)
    assert re.search(r"^ARG BASE_DIGEST$", recipe, re.MULTILINE)  # no default
    assert re.search(r"^From: nvidia/cuda@\{\{ BASE_DIGEST \}\}$", definition, re.MULTILINE)
    assert f"nvidia/cuda:{tag}" in definition
    for text in (recipe, definition):
        assert "install.py --venv /opt/molt --extra gpu" in text
        assert not re.search(r"https?://|--index-url|\w\.(io|com|org)/", text)
