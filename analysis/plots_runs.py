"""Two more figures of a report: when and where its runs worked, and what more runs would buy.

Same style, colours and rules as ``plots.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt

from analysis import wording
from analysis.inference import Verdict
from analysis.load import Attempt, Experiment, RunRecord
from analysis.plots import (
    ARM_COLOURS,
    EDGE,
    FAINT,
    HATCHES,
    INK,
    LINES,
    STYLE,
    WIDE,
    plain,
    title_of,
    to_svg,
)
from analysis.sample_size import TARGET_POWER, spread_factors, tost_power, welch_power
from analysis.verdict import EndpointResult

RUNS = tuple(range(3, 31))


def timeline(experiment: Experiment) -> str:
    """Attempts over time, one row a node (more where attempts overlap); "" where no attempt records when it ran."""
    order = [arm.name for arm in experiment.plan.arms]
    runs = [(run, "") for run in experiment.runs]
    runs += [(run, "control ") for run in experiment.controls]
    runs += [(run, "again ") for run in experiment.repeats]
    bars = [(span, run, kind) for run, kind in runs for span in run.spans]
    if not bars:
        return ""
    begin = min(span.started for span, _, _ in bars)
    end = max(_end(span, run) for span, run, _ in bars)
    unit, seconds = ("hours", 3600.0) if end - begin > 3 * 3600 else ("minutes", 60.0)
    lanes = _lanes(bars)
    names = sorted(lanes)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDE, 1.1 + 0.42 * len(names)))
        seen: set[str] = set()
        for row, name in enumerate(names):
            for span, run, kind in lanes[name]:
                index = order.index(run.system)
                start, width = (span.started - begin) / seconds, _end(span, run) - span.started
                lost = span.state != "DONE"
                label = f"{run.system}{', noise floor' if kind else ''}"
                axes.barh(
                    row, width / seconds, left=start, height=0.7, lw=0.8, edgecolor=EDGE,
                    facecolor=(ARM_COLOURS[index], 0.25 if kind else 0.8), hatch=HATCHES[index],
                    label=None if label in seen else label,
                )  # fmt: skip
                seen.add(label)
                text = f"{kind}s{run.seed}{' ✗' if lost else ''}"
                if width > 0.02 * (end - begin):
                    axes.text(
                        start + width / seconds / 2, row, text, ha="center", va="center", fontsize=8,
                        color="#111111", bbox={"fc": "#ffffff", "ec": "none", "alpha": 0.85, "pad": 1},
                    )  # fmt: skip
        hosts = [plain(host) for host, lane in names]
        axes.set_yticks(
            range(len(names)), [h if lane == 0 else "" for h, (_, lane) in zip(hosts, names)]
        )
        axes.invert_yaxis()
        axes.set(xlim=(0, (end - begin) / seconds * 1.01), xlabel=f"{unit} since the first start")
        axes.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=4)
        return to_svg(figure, "timeline")


def _lanes(
    bars: Sequence[tuple[Attempt, RunRecord, str]],
) -> dict[tuple[str, int], list[tuple[Attempt, RunRecord, str]]]:
    """(node, lane) -> attempts that do not overlap, first come first served."""
    lanes: dict[tuple[str, int], list[tuple[Attempt, RunRecord, str]]] = {}
    for bar in sorted(bars, key=lambda item: item[0].started):
        span = bar[0]
        lane = 0
        while (span.host, lane) in lanes and _end(*lanes[span.host, lane][-1][:2]) > span.started:
            lane += 1
        lanes.setdefault((span.host, lane), []).append(bar)
    return lanes


def _end(span: Attempt, run: RunRecord) -> float:
    """When an attempt ended; of a killed one its last record, where that is later than its start."""
    if span.ended is not None:
        return span.ended
    times = run.metrics["time_unix"] if "time_unix" in run.metrics else None
    last = float(times.max()) if times is not None and len(times) else span.started
    return max(last, span.started)


def power_curves(results: Sequence[EndpointResult]) -> list[tuple[str, str]]:
    """(title, figure) an endpoint: power over runs a side with the spread seen here, and the band of that spread."""
    figures = []
    for result in results:
        c = result.comparison
        if c is None or result.decision.verdict == Verdict.INVALID:
            continue
        sd, other = c.tested_spreads
        low, high = spread_factors(c.df)
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=(3.9, 2.6))
            for index, (label, power) in enumerate(
                (
                    (plain(f"equivalence within {wording.margin(result.endpoint)}"), tost_power),
                    ("a difference of one margin", welch_power),
                )
            ):
                curves = [
                    [
                        power(n, sd * f, None if other is None else other * f, c.tested_margin, alpha=c.alpha)
                        for n in RUNS
                    ]
                    for f in (high, 1.0, low)
                ]  # fmt: skip
                style = {"color": ARM_COLOURS[index], "ls": LINES[index]}
                axes.plot(RUNS, curves[1], label=label, **style)
                axes.fill_between(
                    RUNS, curves[0], curves[2], color=ARM_COLOURS[index], alpha=0.12, lw=0
                )
            axes.axhline(TARGET_POWER, color=FAINT, lw=0.8)
            have = min(c.n, c.n_baseline)
            axes.axvline(have, color=INK, lw=0.8, ls=(0, (1, 2)))
            axes.text(have + 0.4, 1.02, f"n = {have}", fontsize=8, va="bottom")
            axes.set(
                xlim=(RUNS[0], RUNS[-1]),
                ylim=(0, 1.02),
                xlabel=f"{'pairs' if c.paired else 'runs a side'}",
                ylabel="power",
            )
            axes.set_xticks([3, 5, 10, 15, 20, 25, 30])
            figure.legend(loc="outside lower left", fontsize=8, ncols=1)
            title = title_of(result, results)
            figures.append((title, to_svg(figure, f"power {title}")))
    return figures
