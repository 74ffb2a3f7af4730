"""Estimators and losses by name, and from a user's own file."""

import textwrap

import pytest
import torch

from molt_core.algo.advantages import advantage_function, grpo
from molt_core.algo.losses import clipped, loss_function
from molt_core.algo.registry import Registry, load_plugins


def write(path, text):
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_built_in_names():
    assert advantage_function("grpo") is grpo
    assert loss_function("clipped") is clipped


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm\.loss: 'clip' is unknown.*'clipped'"):
        loss_function("clip")


def test_a_file_adds_an_estimator_and_a_loss_that_use_its_own_globals(tmp_path):
    plugin = write(
        tmp_path / "mine.py",
        """
        import torch
        from molt_core.algo.advantages import register_advantage
        from molt_core.algo.losses import register_loss

        HALF = 0.5

        @register_advantage("half_reward")
        def half_reward(tokens, config):
            return HALF * tokens.reward[tokens.rollout].float()

        @register_loss("log_likelihood")
        def log_likelihood(tokens, config):
            return -HALF * tokens.logprobs, {}
        """,
    )
    load_plugins([plugin])
    load_plugins([plugin])  # a second process, or a test, may load it again
    tokens = type("T", (), {"reward": torch.tensor([4.0]), "rollout": torch.tensor([0, 0])})
    assert advantage_function("half_reward")(tokens, None).tolist() == [2.0, 2.0]
    assert loss_function("log_likelihood")(type("L", (), {"logprobs": -2.0}), None) == (1.0, {})


def test_a_file_that_fails_is_named(tmp_path):
    broken = write(tmp_path / "broken.py", "1 / 0")
    with pytest.raises(ValueError, match=r"algorithm\.plugins: .*broken\.py: ZeroDivisionError"):
        load_plugins([broken])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.py: FileNotFoundError"):
        load_plugins([str(tmp_path / "absent.py")])


def test_two_files_that_differ_in_a_constant_cannot_have_one_name(tmp_path):
    files = [
        write(
            tmp_path / f"{name}.py",
            f"""
            from molt_core.algo.losses import register_loss
            SIGN = {sign}

            @register_loss("signed")
            def signed(tokens, config):
                return SIGN * tokens, {{}}
            """,
        )
        for name, sign in (("plus", 1), ("minus", -1))
    ]
    load_plugins(files[:1])
    with pytest.raises(
        ValueError, match=r"minus\.py: .*'signed' is registered already, by .*plus\.py"
    ):
        load_plugins(files[1:])
    assert loss_function("signed")(2, None) == (2, {})


def test_any_callable_may_be_registered_and_loaded_again(tmp_path):
    plugin = write(
        tmp_path / "partly.py",
        """
        from functools import partial
        from molt_core.algo.losses import register_loss

        register_loss("partly")(partial(lambda scale, tokens, config: (scale * tokens, {}), 3))
        """,
    )
    load_plugins([plugin])
    load_plugins([plugin])
    assert loss_function("partly")(2, None) == (6, {})


def test_a_built_in_name_is_taken(tmp_path):
    plugin = write(
        tmp_path / "over.py",
        """
        from molt_core.algo.losses import clipped, register_loss

        register_loss("clipped")(clipped)
        """,
    )
    with pytest.raises(ValueError, match="'clipped' is registered already, by molt_core"):
        load_plugins([plugin])


def test_a_file_that_wants_its_neighbour_is_told_to_stand_alone(tmp_path):
    write(tmp_path / "plugin_helper.py", "X = 1")
    plugin = write(tmp_path / "wanting.py", "import plugin_helper")
    with pytest.raises(
        ValueError, match=r"wanting\.py: .*plugin_helper.*; a plug-in is one file: "
    ):
        load_plugins([plugin])
    absent = write(tmp_path / "absent_package.py", "import no_such_package_anywhere")
    with pytest.raises(ValueError, match=r"no_such_package_anywhere'$"):
        load_plugins([absent])


def test_a_name_cannot_be_taken_twice():
    registry = Registry("algorithm.loss")
    registry.register("mine")(lambda tokens, config: 1)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        registry.register("mine")(lambda tokens, config: 2)


def test_one_file_cannot_give_one_name_twice(tmp_path):
    body = """
        from molt_core.algo.losses import register_loss

        @register_loss("copied")
        def first(tokens, config):
            return 1, {}

        @register_loss("copied")
        def second(tokens, config):
            return 2, {}
        """
    with pytest.raises(ValueError, match="'copied' is registered already, by .*twice.py"):
        load_plugins([write(tmp_path / "twice.py", body)])
