"""Which profile, and what is wrong with one."""

from __future__ import annotations

import pytest

from harness import cluster
from harness.cluster import Cluster, choose_cluster, load_cluster
from harness.problems import SpecError


def test_a_wrong_key_is_said_with_file_line_key_and_fix(tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text("partition: gpu\nattempts:\n  preempted: 5\n  timed_uot: 3\n")
    with pytest.raises(SpecError) as error:
        load_cluster(path)
    expected = f"{path}:4: attempts.timed_uot: is not a known key. Did you mean `timed_out`?"
    assert str(error.value).splitlines()[0] == expected


@pytest.mark.parametrize("path", sorted(cluster.PROFILES.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_profiles_here_are_valid(path):
    assert isinstance(load_cluster(path), Cluster)


def test_the_asked_one_wins_over_the_environment_and_that_over_the_clusters_own_name(
    tmp_path, monkeypatch
):
    for name in ("asked", "mine", "own"):
        (tmp_path / f"{name}.yaml").write_text(f"partition: {name}\n")
    monkeypatch.setattr(cluster, "PROFILES", tmp_path)
    monkeypatch.delenv(cluster.VARIABLE, raising=False)
    assert choose_cluster(None, "own").partition == "own"
    assert choose_cluster(None, "elsewhere") == Cluster()
    monkeypatch.setenv(cluster.VARIABLE, "mine")
    assert choose_cluster(None, "own").partition == "mine"
    assert choose_cluster("asked", "own").partition == "asked"


def test_a_profile_that_is_not_there_is_refused_with_those_that_are(tmp_path, monkeypatch):
    (tmp_path / "one.yaml").write_text("{}\n")
    monkeypatch.setattr(cluster, "PROFILES", tmp_path)
    with pytest.raises(SpecError, match="there is no such cluster profile. Profiles here: one;"):
        choose_cluster("two")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("paths: {models: models}", "models: models is no named place"),
        ("time_limit: a day", "'a day' is not a time"),
    ],
)
def test_a_wrong_place_or_time_is_refused(tmp_path, line, said):
    (tmp_path / "here.yaml").write_text(f"{line}\n")
    with pytest.raises(SpecError, match=f"here.yaml:1: {line.partition(':')[0]}: {said}"):
        load_cluster(tmp_path / "here.yaml")


def test_a_job_asks_for_no_more_time_than_the_cluster_gives():
    """A partition of four hours; its limit in Slurm's words too."""
    assert Cluster(time_limit="04:00:00").job_s(36000) == 4 * 3600
    assert Cluster(time_limit="1-00:00:00").job_s(36000) == 36000
    assert Cluster().job_s(36000) == 36000
