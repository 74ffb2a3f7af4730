"""The report's figures as inline SVG: they take the page's fonts and colours, in light, in dark and on paper.

Arms are told apart by colour (Okabe-Ito), line style and marker, so that a grey print reads as well. Curves are smoothed
here and nowhere else, and say so. A figure is a pure function from runs or results to an SVG string.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("svg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from analysis import wording  # noqa: E402
from analysis.inference import Comparison, Verdict, mean_interval  # noqa: E402
from analysis.load import FINISHED, Experiment, RunRecord, steady  # noqa: E402
from analysis.summaries import mean_over_steps  # noqa: E402
from analysis.verdict import EndpointResult  # noqa: E402

INK, FAINT = "#010203", "#040506"
ARM_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f01", "#56b4e8", "#5c5c5c", "#7a4b1e",
)  # fmt: skip
EDGE = "#1f1f1f"
LINES = ("-", "--", ":", "-.", (0, (8, 2, 1, 2, 1, 2)), (0, (10, 4)), (0, (4, 1)), (0, (1, 4)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "|||", "ooo")
MOST_ARMS = len(ARM_COLOURS)
"""Arms that a figure can tell apart; the report of an experiment with more shows no figure of its arms."""
# What the page's style sheet decides; matplotlib writes the colours above, the page reads these.
PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--faint)"} | {
    colour: f"var(--arm-{index})" for index, colour in enumerate(ARM_COLOURS)
}
PARTS = {
    "t_forward_backward_s": ("forward, backward", "#009e72", ""),
    "t_optimizer_s": ("optimiser", "#cc79a8", "///"),
    "t_critic_s": ("critic", "#a6761d", "\\\\"),
    "t_refit_s": ("refit", "#e69f00", "..."),
    "t_probe_s": ("probe", "#d5ccff", "|||"),
    "t_eval_s": ("evaluation", "#56b4e9", "\\\\\\"),
    "t_checkpoint_s": ("checkpoint", "#8c8c8c", "xxx"),
    "t_wait_s": ("waiting for generation", "#f0e442", "---"),
}
WIDE = 11.0
"""Inches of a figure over the whole page; the fonts of all figures are 10 points."""
MOST_MARGINS = 12.0
"""Margins to each side of a forest plot; what lies beyond is drawn as an arrowhead at its edge."""
SMOOTHING = 9
"""Steps of the centred moving mean in the training curves."""

STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.use": True,
}


def forest(results: Sequence[EndpointResult]) -> str:
    """Every endpoint's difference in units of its margin, better to the right; "" where no number may be shown."""
    shown = [r for r in results if r.comparison and r.decision.verdict != Verdict.INVALID]
    if not shown:
        return ""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDE, 0.9 + 0.55 * len(results)))
        axes.axvspan(-1, 1, color=FAINT, alpha=0.22, lw=0)
        axes.axvline(0, color=INK, lw=0.8)
        farthest = max(abs(_in_margins(r, v)) for r in shown for v in _spans(r.comparison))
        reach = min(max(2.0, farthest) * 1.08, MOST_MARGINS)
        for row, result in enumerate(reversed(results)):
            label = plain(f"{title_of(result, results)}\n{wording.margin(result.endpoint)}")
            axes.text(
                -0.01, row, label, transform=axes.get_yaxis_transform(), ha="right", va="center"
            )
            if result not in shown:
                invalid = result.decision.verdict == Verdict.INVALID
                why = (
                    plain(f"INVALID: {result.decision.detail}")
                    if invalid
                    else "some runs have no value"
                )
                axes.text(1.01, row, why, transform=axes.get_yaxis_transform(), va="center")
                continue
            c = result.comparison
            _draw_effect(axes, row, [_in_margins(result, v) for v in _spans(c)], reach)
            text = f"{wording.effect(result.endpoint, c.estimate)}  {wording.interval(result.endpoint, c.ci_low, c.ci_high)}"
            axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center")
        axes.set(xlim=(-reach, reach), ylim=(-0.6, len(results) - 0.4), yticks=[])
        axes.set_xlabel("difference, in units of the margin")
        for place, side, text in (
            (0, "left", "\u2190 baseline better"),
            (1, "right", "candidate better \u2192"),
        ):
            axes.text(place, 1.02, text, transform=axes.transAxes, ha=side, va="bottom")
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        return to_svg(figure, "forest")


def _spans(c: Comparison) -> tuple[float, ...]:
    """Estimate, the interval of DIFFERENT, the interval of EQUIVALENT."""
    return c.estimate, c.ci_low, c.ci_high, c.tost_low, c.tost_high


def _draw_effect(axes: Axes, row: int, spans: Sequence[float], reach: float) -> None:
    """Estimate and intervals in margins; an arrowhead at the edge where they go on beyond ``reach``."""
    centre, low, high, tost_low, tost_high = np.clip(spans, -reach, reach)
    line = {"color": ARM_COLOURS[0], "solid_capstyle": "butt"}
    axes.plot([low, high], [row, row], lw=1.2, **line)
    axes.plot([tost_low, tost_high], [row, row], lw=5, **line)
    beyond = {"ls": "", "ms": 9, "color": ARM_COLOURS[0]}
    for edge, marker in ((-reach, "<"), (reach, ">")):
        if any(abs(v) > reach and v * edge > 0 for v in spans):
            axes.plot(0.98 * edge, row, marker=marker, **beyond)
    if abs(spans[0]) <= reach:
        axes.plot(centre, row, marker="D", ms=8, mfc="white", mec=ARM_COLOURS[0], mew=1.8)


def evaluation_curves(experiment: Experiment, field: str, label: str) -> str:
    """Recorded values of ``field`` by step: every seed thin, the arm's mean with its 95 % t interval."""
    return _curves(experiment, field, label, smoothing=1, marked=True)


def training_curves(experiment: Experiment, field: str, label: str) -> str:
    """The same for a field of every step, seeds smoothed by a moving mean."""
    return _curves(experiment, field, label, smoothing=SMOOTHING, marked=False)


def step_parts(experiment: Experiment) -> str:
    """Mean seconds of a steady step per run, stacked by what the time went to."""
    runs = [
        run
        for arm in experiment.plan.arms
        for run in experiment.finished(arm.name)
        if "wall_s" in run.metrics
    ]
    if not runs:
        return ""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDE, 1.2 + 0.27 * len(runs)))
        rows = [steady(run, experiment.plan.exclusion) for run in runs]
        left = np.zeros(len(runs))
        for field, (label, colour, hatch) in PARTS.items():
            width = np.array([mean_over_steps(row, field) for row in rows])
            if width.any():
                axes.barh(
                    range(len(runs)), width, left=left, color=colour, hatch=hatch, label=label,
                    edgecolor=EDGE, lw=0.4, height=0.72,
                )  # fmt: skip
            left += width
        rest = np.array([row["wall_s"].mean() for row in rows]) - left
        axes.barh(
            range(len(runs)), np.maximum(rest, 0), left=left, color="none", edgecolor=INK, lw=0.4, height=0.72,
            label="not accounted for",
        )  # fmt: skip
        axes.set_yticks(range(len(runs)), [f"{run.system}, seed {run.seed}" for run in runs])
        axes.invert_yaxis()
        axes.set_xlabel("seconds a step, mean over steady steps")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=4)
        return to_svg(figure, "parts")


def mismatch_and_lag(experiment: Experiment) -> str:
    """Log-probability mismatch of engine and trainer after each refit, with its bounds; and the lag."""
    bounds = experiment.plan.validity
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDE, 3.2), width_ratios=(3, 2))
        for index, arm in enumerate(experiment.plan.arms):
            style = {"color": ARM_COLOURS[index], "ls": LINES[index], "lw": 1.2}
            for field, axes, alpha in (("mismatch_p99", left, 1.0), ("mismatch_max", left, 0.45)):
                table = _table(experiment.finished(arm.name), field)
                if not table.empty:
                    axes.plot(
                        table.max(axis=1), alpha=alpha, label=f"{arm.name} {field[9:]}", **style
                    )
            table = _table(experiment.finished(arm.name), "lag_mean")
            if not table.empty:
                right.plot(_smooth(table.mean(axis=1)), label=arm.name, **style)
        for bound, text in (
            (bounds.mismatch_p99, "bound on p99"),
            (bounds.mismatch_max, "bound on max"),
        ):
            left.axhline(bound, color=INK, lw=0.8, ls=(0, (1, 2)))
            left.text(
                0.99,
                bound,
                text,
                transform=left.get_yaxis_transform(),
                ha="right",
                va="bottom",
                fontsize=8,
            )
        left.set(
            yscale="log", xlabel="step", title="|log-probability difference|, nats, worst seed"
        )
        right.set(xlabel="step", title=f"mean lag, versions (moving mean of {SMOOTHING})")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.title.set_fontsize(10)
            if axes.has_data() and axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=8, ncols=2)
        return to_svg(figure, "mismatch")


def distributions(
    experiment: Experiment, results: Sequence[EndpointResult]
) -> list[tuple[str, str]]:
    """(title, figure) an endpoint: one dot a run, the arm's mean with its 95 % t interval below."""
    order = [arm.name for arm in experiment.plan.arms]
    figures = []
    for result in results:
        values = result.measurement.values
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=(3.9, 0.75 + 0.5 * len(values)))
            for row, (arm, by_seed) in enumerate(values.items()):
                sample, index = list(by_seed.values()), order.index(arm)
                if not sample:
                    continue
                style = {"color": ARM_COLOURS[index], "marker": MARKERS[index]}
                axes.plot(sample, [row] * len(sample), ls="", ms=6, alpha=0.7, mew=0, **style)
                mean, low, high = mean_interval(sample)
                axes.plot([low, high], [row + 0.28] * 2, color=ARM_COLOURS[index], lw=2)
                axes.plot(mean, row + 0.28, ms=6, mfc="none", mew=1.6, **style)
            axes.set_yticks(
                range(len(values)), [f"{arm} (n = {len(v)})" for arm, v in values.items()]
            )
            axes.set(ylim=(-0.4, len(values) - 0.5), xlabel=plain(result.endpoint.unit))
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.ticklabel_format(axis="x", scilimits=(-3, 5), useMathText=True)
            title = title_of(result, results)
            figures.append((title, to_svg(figure, f"runs {title}")))
    return figures


def title_of(result: EndpointResult, results: Sequence[EndpointResult]) -> str:
    """The endpoint, with the candidate where several are compared."""
    several = len({r.measurement.candidate for r in results}) > 1
    return (
        f"{result.endpoint.name}, {result.measurement.candidate}"
        if several
        else result.endpoint.name
    )


def _curves(experiment: Experiment, field: str, label: str, *, smoothing: int, marked: bool) -> str:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.6, 3.5))
        for index, arm in enumerate(experiment.plan.arms):
            table = _table(experiment.finished(arm.name), field)
            if table.empty:
                continue
            _draw_arm(axes, table.apply(_smooth, window=smoothing), index, arm.name, marked)
        control = _table([run for run in experiment.controls if run.state == FINISHED], field)
        if not control.empty:
            level = control.apply(_smooth, window=smoothing).mean(axis=1)
            axes.plot(level, color=INK, ls=(0, (1, 2)), lw=1.2, label="learning rate zero")
        if not axes.has_data():
            plt.close(figure)
            return ""
        axes.set(xlabel="step", ylabel=plain(label))
        axes.margins(x=0.01)
        figure.legend(loc="outside upper left", ncols=3, fontsize=9)
        return to_svg(figure, field)


def _draw_arm(axes: Axes, table: pd.DataFrame, index: int, name: str, marked: bool) -> None:
    """Seeds thin; mean and interval where every seed has a value."""
    colour, line = ARM_COLOURS[index], LINES[index]
    for seed in table:
        axes.plot(table[seed].dropna(), color=colour, ls=line, lw=0.6, alpha=0.45)
    whole = table.dropna()
    summary = np.array([mean_interval(row) for row in whole.to_numpy()])
    if not len(summary):
        return
    marker = MARKERS[index] if marked else ""
    axes.plot(
        whole.index,
        summary[:, 0],
        color=colour,
        ls=line,
        marker=marker,
        ms=4.5,
        label=f"{name}, mean of {table.shape[1]}",
    )
    axes.fill_between(whole.index, summary[:, 1], summary[:, 2], color=colour, alpha=0.15, lw=0)


def _table(runs: Sequence[RunRecord], field: str) -> pd.DataFrame:
    """Steps x seeds of one field; steps at which no run recorded it are left out."""
    columns = {run.seed: run.metrics[field] for run in runs if field in run.metrics}
    return pd.DataFrame(columns).dropna(how="all")


def _smooth(series: pd.Series, window: int = SMOOTHING) -> pd.Series:
    return series.rolling(window, center=True, min_periods=1).mean()


def _in_margins(result: EndpointResult, value: float) -> float:
    """A difference or ratio in units of the margin on the tested scale, positive where the candidate is better."""
    tested = math.log(value) if result.endpoint.scale == "ratio" else value
    sign = 1 if result.endpoint.direction == "higher" else -1
    return sign * tested / result.comparison.tested_margin


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element that scales with its column and takes the page's colours and fonts."""
    buffer = io.StringIO()
    with plt.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in PAGE_COLOURS.items():
        text = text.replace(colour, variable)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{html.escape(name)}">{body}'


def plain(text: str) -> str:
    """A name as it is: matplotlib would read what stands between two dollar signs as mathematics."""
    return text.replace("$", r"\$")
