"""What a figure must not hide: an effect beyond its edge, and which arm is which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis import plots
from analysis.load import load_experiment
from analysis.report import write_report
from analysis.verdict import judge
from tests.analysis.synthetic import ACCURACY, MEGATRON, Truth, write_experiment


class Recorder:
    """Stands in for an Axes: every line plotted, as (x, y, options)."""

    def __init__(self):
        self.lines = []

    def plot(self, x, y, **options):
        self.lines.append((x, y, options))

    def marked(self, marker):
        return [(x, y) for x, y, options in self.lines if options.get("marker") == marker]


@pytest.mark.parametrize(
    ("spans", "left", "right", "diamonds"),
    [
        ((0.1, -1.0, 1.2, -0.8, 1.0), 0, 0, 1),
        ((3.0, -2.0, 14.0, -1.0, 11.0), 0, 1, 1),
        ((20.0, 15.0, 25.0, 16.0, 24.0), 0, 1, 0),
        ((-20.0, -40.0, -0.5, -30.0, -1.0), 1, 0, 0),
        ((0.0, -30.0, 30.0, -20.0, 20.0), 1, 1, 1),
    ],
)
def test_what_lies_beyond_the_edge_is_an_arrowhead_at_it(spans, left, right, diamonds):
    axes = Recorder()
    plots._draw_effect(axes, 0, spans, 12.0)
    assert axes.marked("<") == [(-11.76, 0)] * left and axes.marked(">") == [(11.76, 0)] * right
    assert len(axes.marked("D")) == diamonds
    assert all(
        -12 <= x <= 12 for xs, _, _ in axes.lines for x in ([xs] if isinstance(xs, float) else xs)
    )


def test_no_two_arms_share_a_colour_a_line_a_marker_or_a_hatch():
    for styles in (plots.ARM_COLOURS, plots.LINES, plots.MARKERS, plots.HATCHES):
        assert len(set(styles)) == plots.MOST_ARMS == len(styles)
    others = {colour for _, colour, _ in plots.PARTS.values()} | {
        plots.INK,
        plots.FAINT,
        plots.EDGE,
    }
    assert not others & set(plots.ARM_COLOURS)


def arms(count: int) -> dict[str, Truth]:
    return {
        "megatron": MEGATRON,
        **{f"c{i}": replace(Truth(), accuracy=0.88) for i in range(1, count)},
    }


def test_every_arm_of_eight_has_its_own_colour_in_the_page(tmp_path):
    folder = write_experiment(
        tmp_path, seeds=(0, 1, 2), steps=12, arms=arms(8), endpoints=(ACCURACY,)
    )
    figure = plots.evaluation_curves(load_experiment(folder), "eval_reward_mean", "accuracy")
    assert all(f"var(--arm-{index})" in figure for index in range(8))


def test_more_arms_than_styles_are_said_to_be_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MOST_ARMS", 1)
    folder = write_experiment(tmp_path, seeds=(0, 1, 2), steps=12, endpoints=(ACCURACY,))
    write_report(folder)
    page = (folder / "report" / "report.html").read_text()
    assert "2 arms are more than a figure can tell apart" in page
    assert 'aria-label="timeline"' not in page and 'aria-label="forest"' in page


def test_a_gap_of_many_margins_still_shows_in_the_forest(tmp_path):
    narrow = ACCURACY.model_copy(update={"margin": 0.004})
    far = {"megatron": MEGATRON, "molt": replace(Truth(), accuracy=0.6)}
    results = judge(
        load_experiment(write_experiment(tmp_path, steps=12, arms=far, endpoints=(narrow,)))
    )
    assert 'aria-label="forest"' in plots.forest(results)
