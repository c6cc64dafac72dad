"""Renders the sections of a run's report as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from controller.tracking.contents import RunContents
from controller.tracking.figures import THROUGHPUT, Figures
from controller.tracking.metrics import Sample
from reports.axes import linear_axis, step_axis
from reports.charts import Bar, Series, bar_chart, line_chart
from reports.page import card, code, escape, page, table
from reports.units import bytes_text, duration_text, figure_text, percent_text

_HELDOUT = (("evaluation/accuracy", "held-out accuracy"), ("evaluation/reward", "held-out mean reward"))
_REWARD = "reward/mean"
_CURVES = (
    ("KL to the reference", "kl/mean", "KL, nats per token"),
    ("KL to the reference, in the loss", "actor/ref_kl", "KL, nats per token"),
    ("Cost", "cost/mean", "cost per response"),
    ("Lagrange multiplier", "lambda", "lambda"),
    ("Entropy", "actor/entropy", "entropy, nats per token"),
    ("Response length", "response/length_mean", "tokens per response"),
    ("Throughput", "time/tokens_per_s", "tokens per second"),
    ("Actor loss", "actor/loss", "loss"),
    ("Critic loss", "critic/loss", "value loss"),
    ("Held-out loss", "evaluation/loss", "nats per response token"),
    ("Held-out KL to the teacher", "evaluation/reverse_kl", "KL, nats per token"),
    ("DPO loss", "dpo/loss", "loss per pair"),
    ("DPO training pairs in the right order", "dpo/accuracy", "share of pairs"),
    ("Reward model loss", "reward/loss", "loss per pair"),
    ("Training pairs in the right order", "reward/accuracy", "share of pairs"),
    ("Actor gradient norm", "actor/grad_norm", "norm before clipping"),
)


def render(contents: RunContents) -> str:
    """Renders the report as an HTML page, which is well-formed XML too."""
    figures = contents.figures
    sections = [
        _header(contents),
        _tiles(headline(contents)),
        *_learning_curves(figures),
        *(_curve(figures, title, key, legend) for title, key, legend in _CURVES),
        _stage_times(figures),
        _service_memory(figures),
        _transfers(figures),
        _sample_table(figures.samples),
        _run_table({**contents.run, **contents.summary}),
        _config(contents.config),
    ]
    return page(contents.name, sections)


def headline(contents: RunContents) -> list[tuple[str, str]]:
    """Returns (title, text) of each headline figure of the report, from the summary where there is one, else from the
    steps so far."""
    figures = contents.figures
    values: dict[str, Any] = {"steps": figures.last_step, "tokens_per_s": figures.mean(THROUGHPUT)}
    for name in ("accuracy", "reward", "loss"):
        values[f"{name}_before"] = figures.first.get(f"evaluation/{name}")
        values[f"{name}_after"] = figures.last.get(f"evaluation/{name}")
    values |= {**contents.run, **contents.summary}
    texts = {
        "accuracy_before": ("Held-out accuracy before", percent_text),
        "accuracy_after": ("Held-out accuracy after", percent_text),
        "reward_before": ("Held-out mean reward before", figure_text),
        "reward_after": ("Held-out mean reward after", figure_text),
        "steps": ("Steps", figure_text),
        "loss_before": ("Held-out loss before", figure_text),
        "loss_after": ("Held-out loss after", figure_text),
        "tokens_per_s": ("Tokens per second", figure_text),
        "wall_s": ("Wall time", duration_text),
        "seed": ("Seed", str),
        "actor_sha256": ("SHA-256 of the final actor", str),
    }
    return [(title, text(values[key])) for key, (title, text) in texts.items() if values.get(key) is not None]


def stage_means(figures: Figures) -> dict[str, float]:
    """Returns the mean time of each stage in seconds per training step, by name, the longest first; from the metrics
    `time/<stage>_s`."""
    means = {
        key.removeprefix("time/").removesuffix("_s"): mean.total / figures.steps
        for key, mean in figures.means.items()
        if key.startswith("time/")
        and key.endswith("_s")
        and not key.endswith("_per_s")
        and key != "time/step_s"
    }
    return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))


def before_and_after(samples: Mapping[int, Sequence[Sample]]) -> tuple[list[int], list[tuple[Sample, ...]]]:
    """Returns the first and the last step with samples, and for each prompt of a source with samples at both the two
    samples.

    Returns one step, and one sample per prompt, where only one step has samples.
    """
    steps = sorted(samples)
    last = samples[steps[-1]]
    if len(steps) < 2:
        return steps, [(sample,) for sample in last]
    first = {(sample.source, sample.prompt): sample for sample in samples[steps[0]]}
    pairs = [(first[key], sample) for sample in last if (key := (sample.source, sample.prompt)) in first]
    return [steps[0], steps[-1]], pairs


def _header(contents: RunContents) -> str:
    step = contents.figures.last_step or 0
    state = "complete" if contents.summary else f"interrupted after step {step}"
    if contents.is_running:
        state = f"running, after step {step}"
    return f'<header><h1>{escape(contents.name)}</h1><p class="state">{state}</p></header>'


def _tiles(figures: Sequence[tuple[str, str]]) -> str:
    if not figures:
        return '<p class="note">No step was completed.</p>'
    tiles = (
        f"<div{_long(text)}><dt>{escape(title)}</dt><dd>{escape(text)}</dd></div>" for title, text in figures
    )
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _learning_curves(figures: Figures) -> list[str]:
    """Renders the held-out metric and the training reward: in one chart where all values are between -0.25 and 1.25,
    else in two."""
    key, name = next((each for each in _HELDOUT if each[0] in figures.curves), _HELDOUT[0])
    heldout = Series(name, figures.points(key))
    reward = Series("mean training reward", figures.points(_REWARD))
    both = [*heldout.points, *reward.points]
    if all(-0.25 <= value <= 1.25 for _, value in both if math.isfinite(value)):
        return [_wide_card("Learning curve", [reward, heldout], include=(0.0,))]
    return [
        _wide_card(f"Learning curve: {name}", [heldout], include=(0.0,) if key == _HELDOUT[0][0] else ()),
        _wide_card("Learning curve: training reward", [reward], include=()),
    ]


def _wide_card(title: str, series: Sequence[Series], include: Sequence[float]) -> str:
    """Renders a card over the whole width, with one chart for wide screens and one for phones."""
    drawn = [line for line in series if line.points]
    wide = _by_step(title, drawn, include, width=940, height=320)
    narrow = _by_step(title, drawn, include)
    both = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    return card(title, wide and both, is_wide=True)


def _curve(figures: Figures, title: str, key: str, legend: str) -> str:
    return card(title, _by_step(title, [Series(legend, figures.points(key))]))


def _by_step(
    title: str,
    series: Sequence[Series],
    include: Sequence[float] = (),
    *,
    width: int = 440,
    height: int = 240,
) -> str:
    """Renders a line chart over the steps; returns an empty string if no point is finite.

    Args:
        title: Title of the chart.
        series: Lines of the chart.
        include: Values that the y axis must include.
        width, height: Size in user units of the SVG.
    """
    points = [point for line in series for point in line.finite]
    if not points:
        return ""
    x, y = step_axis([step for step, _ in points]), linear_axis([*(value for _, value in points), *include])
    return line_chart(series, x, y, "step", title, width=width, height=height)


def _stage_times(figures: Figures) -> str:
    means = stage_means(figures)
    if not means:
        return ""
    total_s = figures.mean("time/step_s") or sum(means.values())
    share = {name: f"{seconds:.3f} s, {percent_text(seconds / total_s)}" for name, seconds in means.items()}
    bars = [Bar(name, seconds, share[name]) for name, seconds in means.items()]
    note = (
        f"Mean per step and share of the step ({total_s:.3f} s). "
        "Calls on different devices run concurrently, so the shares may add up to more than 100 %."
    )
    return card("Stage times", bar_chart(bars, "Mean seconds per stage"), note=note)


def _service_memory(figures: Figures) -> str:
    peaks = {
        key.removeprefix("mem/").removesuffix("_bytes"): peak
        for key, peak in sorted(figures.peaks.items())
        if key.endswith("_bytes")
    }
    if not peaks:
        return ""
    bars = [Bar(service, peak, bytes_text(peak)) for service, peak in peaks.items()]
    chart = bar_chart(bars, "Memory per service")
    return card("Memory of the services", chart, note="Maximum over all steps.")


def _transfers(figures: Figures) -> str:
    controller, batch = (figures.mean(f"transfer/{name}_bytes") for name in ("controller", "batch"))
    if not controller or not batch:
        return ""
    means = {"through controller": controller, "batch": batch}
    bars = [Bar(name, value, bytes_text(value)) for name, value in means.items()]
    note = (
        f"Mean per step. The batch is all columns of a step's rows. Prompts, texts for rewards, and the inputs "
        f"and outputs of the advantage computation pass through the controller: {bytes_text(controller)}, or "
        f"{percent_text(controller / batch)} of the batch. Response token ids and weights do not."
    )
    return card("Bytes through the controller", bar_chart(bars, "Bytes per step"), note=note)


def _sample_table(samples: Mapping[int, Sequence[Sample]]) -> str:
    if not samples:
        return ""
    steps, rows = before_and_after(samples)
    names = [f"Step {step}" if step else "Before training" for step in steps]
    source = ["Source"] if any(row[-1].source for row in rows) else []
    shown = (
        [
            *(code(row[-1].source) for _ in source),
            code(row[-1].prompt),
            code(row[-1].ground_truth),
            *(f"{code(sample.response)}<small>reward {figure_text(sample.reward)}</small>" for sample in row),
        ]
        for row in rows
    )
    return card("Sample responses", table([*source, "Prompt", "Expected", *names], shown), is_wide=True)


def _run_table(values: Mapping[str, Any]) -> str:
    """Renders a table of the run's identity and platform, with the values that are known."""
    shown = {
        "Algorithm": values.get("algorithm"),
        "Command line": values.get("command_line"),
        "Version": " ".join(str(values[key]) for key in ("version", "commit") if values.get(key)),
        "Started": values.get("started"),
        **{f"Service {name}": _service_text(each) for name, each in values.get("services", {}).items()},
    }
    rows = [[escape(title), code(str(text))] for title, text in shown.items() if text]
    return card("The run", table([], rows) if rows else "", is_wide=True)


def _service_text(service: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in service.items() if value)


def _config(text: str) -> str:
    details = f"<details><summary>As resolved</summary><pre>{escape(text)}</pre></details>"
    return card("Configuration", details if text else "", is_wide=True)


def _long(text: str) -> str:
    return ' class="long"' if len(text) > 20 else ""
