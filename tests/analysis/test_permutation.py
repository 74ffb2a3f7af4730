"""Exact permutation p-values against counts made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.permutation import exact_p, smallest_p


def arrays(*samples):
    return [np.asarray(sample, dtype=float) for sample in samples]


def test_four_against_four_set_apart_is_two_of_seventy():
    low, high = arrays([1, 2, 3, 4.5], [11, 12, 13, 14.2])
    assert exact_p(low, high, paired=False) == pytest.approx(2 / 70)


def test_six_pairs_of_one_sign_are_two_of_sixty_four():
    ours, theirs = arrays([1, 2, 3, 4, 5, 6], [0.5, 1.4, 2.7, 3.2, 4.4, 5.1])
    assert exact_p(ours, theirs, paired=True) == pytest.approx(2 / 64)


def test_one_swap_from_the_extreme_is_counted_by_hand():
    """Of the 70 ways only {1, 2, 3, 4} has a more extreme t than {1, 2, 3, 5}; with mirror images 4 of 70."""
    ours, theirs = arrays([1, 2, 3, 5], [4, 6, 7, 8])
    assert exact_p(ours, theirs, paired=False) == pytest.approx(4 / 70)


def test_three_against_three_can_show_nothing():
    """The smallest p there is: 2 of C(6, 3) = 20."""
    assert smallest_p(3, 3, paired=False) == pytest.approx(0.1)
    assert exact_p(*arrays([1, 2, 3], [11, 12, 13]), paired=False) is None


def test_too_many_arrangements_are_left_to_the_t_test():
    assert exact_p(np.arange(12.0), np.arange(12.0) + 5, paired=False) is None
