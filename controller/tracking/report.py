"""The report of a run: one HTML file that loads nothing, made from what the run left in its directory so far."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.tracking.charts import CHART_STYLE, Bar, Series, bar_chart, line_chart
from controller.tracking.figures import THROUGHPUT, Figures
from controller.tracking.metrics import Sample
from controller.tracking.run_directory import write_atomically
from controller.tracking.units import bytes_text, duration_text, figure_text, percent_text
from rlhf.errors import RlhfError

REPORT_FILE = "report.html"
CONFIG_FILES = ("config.toml", "config.json")
SUMMARY_FILE = "summary.json"
RUN_FILE = "run.json"
"""Identity of the run: algorithm, command line, platform. Written before the first step."""

_NOT_IN_HTML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")
_HELDOUT = (("evaluation/accuracy", "held-out accuracy"), ("evaluation/reward", "held-out mean reward"))
_REWARD = "reward/mean"
_CURVES = (
    ("KL to the reference", "kl/mean", "KL, nats per token"),
    ("Cost", "cost/mean", "cost per response"),
    ("Lagrange multiplier", "lambda", "lambda"),
    ("Entropy", "actor/entropy", "entropy, nats per token"),
    ("Response length", "response/length_mean", "tokens per response"),
    ("Throughput", "time/tokens_per_s", "tokens per second"),
    ("Critic loss", "critic/loss", "value loss"),
    ("Held-out loss", "evaluation/loss", "nats per response token"),
    ("Reward model loss", "reward/loss", "loss per pair"),
    ("Training pairs in the right order", "reward/accuracy", "share of pairs"),
    ("Actor gradient norm", "actor/grad_norm", "norm before clipping"),
)


@dataclass(frozen=True)
class Found:
    """Contents of a run directory."""

    name: str
    figures: Figures
    """Of the metrics and samples."""
    run: Mapping[str, Any]
    """Of `run.json`."""
    summary: Mapping[str, Any]
    """Of `summary.json`; empty where the run has not come to its end."""
    config: str
    """Text of the resolved configuration."""
    is_running: bool = False
    """Whether the run goes on."""


def write_report(run_dir: Path, figures: Figures | None = None, *, is_running: bool = False) -> Path:
    """Write `report.html` from `metrics.jsonl`, `samples.jsonl`, `run.json`, `summary.json` and `config.toml` or
    `config.json`; returns its path.

    What is missing is left out, so a run that was interrupted has a report too.

    Args:
        figures: Those of the metrics and samples, where they are known; else the files are read.
        is_running: Whether the run goes on.

    Raises:
        RlhfError: There is no such directory, a file is damaged, or the disk refused.
    """
    if not run_dir.is_dir():
        raise RlhfError(f"run directory {run_dir}: no such directory")
    found = Found(
        name=run_dir.resolve().name,
        figures=figures or Figures.read(run_dir),
        run=_read_json(run_dir / RUN_FILE),
        summary=_read_json(run_dir / SUMMARY_FILE),
        config=next((path.read_text() for name in CONFIG_FILES if (path := run_dir / name).is_file()), ""),
        is_running=is_running,
    )
    return write_atomically(run_dir / REPORT_FILE, render(found))


def render(found: Found) -> str:
    """The page, as HTML that is well-formed XML too."""
    figures = found.figures
    sections = [
        _header(found),
        _tiles(headline(found)),
        *_learning_curves(figures),
        *(_curve(figures, title, key, legend) for title, key, legend in _CURVES),
        _stage_times(figures),
        _service_memory(figures),
        _transfers(figures),
        _sample_table(figures.samples),
        _run_table({**found.run, **found.summary}),
        _config(found.config),
    ]
    body = "\n".join(section for section in sections if section)
    return _PAGE.format(title=_escape(found.name), style=_STYLE + CHART_STYLE, body=body)


def headline(found: Found) -> list[tuple[str, str]]:
    """Titles and texts of the figures on top: from the summary, or as far as the run got."""
    figures = found.figures
    values: dict[str, Any] = {"steps": figures.last_step, "tokens_per_s": figures.mean(THROUGHPUT)}
    for name in ("accuracy", "reward", "loss"):
        values[f"{name}_before"] = figures.first.get(f"evaluation/{name}")
        values[f"{name}_after"] = figures.last.get(f"evaluation/{name}")
    values |= {**found.run, **found.summary}
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
    """Mean seconds per training step of each stage, the longest first, from the keys `time/<stage>_s`."""
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
    """First and last step that has samples, and for each prompt of the last its samples at these steps.

    One step, and one sample per prompt, where there are samples of a single step only.
    """
    steps = sorted(samples)
    last = samples[steps[-1]]
    if len(steps) < 2:
        return steps, [(sample,) for sample in last]
    first = {sample.prompt: sample for sample in samples[steps[0]]}
    pairs = [(first[sample.prompt], sample) for sample in last if sample.prompt in first]
    return [steps[0], steps[-1]], pairs


def _header(found: Found) -> str:
    step = found.figures.last_step or 0
    state = "complete" if found.summary else f"interrupted after step {step}"
    if found.is_running:
        state = f"running, after step {step}"
    return f'<header><h1>{_escape(found.name)}</h1><p class="state">{state}</p></header>'


def _tiles(figures: Sequence[tuple[str, str]]) -> str:
    if not figures:
        return '<p class="note">No step was completed.</p>'
    tiles = (
        f"<div{_long(text)}><dt>{_escape(title)}</dt><dd>{_escape(text)}</dd></div>"
        for title, text in figures
    )
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _learning_curves(figures: Figures) -> list[str]:
    """Charts of the held-out metric and the training reward: in one chart where one axis fits both, rewards from
    about 0 to 1, else in two."""
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
    """A card over the whole width, with a chart for wide screens and one for phones."""
    drawn = [line for line in series if line.points]
    wide = line_chart(drawn, title, "step", width=940, height=320, include=include)
    narrow = line_chart(drawn, title, "step", include=include)
    return wide and _card(title, f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>', "full")


def _curve(figures: Figures, title: str, key: str, legend: str) -> str:
    chart = line_chart([Series(legend, figures.points(key))], title, "step")
    return chart and _card(title, chart)


def _stage_times(figures: Figures) -> str:
    means = stage_means(figures)
    if not means:
        return ""
    total_s = figures.mean("time/step_s") or sum(means.values())
    share = {name: f"{seconds:.3f} s, {percent_text(seconds / total_s)}" for name, seconds in means.items()}
    bars = [Bar(name, seconds, share[name]) for name, seconds in means.items()]
    note = (
        f"Mean per step and share of the step ({total_s:.3f} s). "
        "Calls on devices of their own run at the same time, so shares may add up to more than all."
    )
    return _card("Stage times", bar_chart(bars, "Mean seconds per stage"), note=note)


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
    return _card("Memory of the services", chart, note="Highest of all steps.")


def _transfers(figures: Figures) -> str:
    controller, batch = (figures.mean(f"transfer/{name}_bytes") for name in ("controller", "batch"))
    if not controller or not batch:
        return ""
    means = {"through controller": controller, "batch": batch}
    bars = [Bar(name, value, bytes_text(value)) for name, value in means.items()]
    note = (
        f"Mean per step. The batch is all columns of a step's rows. Through the controller pass the prompts, the texts "
        f"that rewards read, and the columns that advantages are computed from and sent as: {bytes_text(controller)}, "
        f"as much as {percent_text(controller / batch)} of the batch. Token ids and weights never do."
    )
    return _card("Bytes through the controller", bar_chart(bars, "Bytes per step"), note=note)


def _sample_table(samples: Mapping[int, Sequence[Sample]]) -> str:
    if not samples:
        return ""
    steps, rows = before_and_after(samples)
    names = [f"Step {step}" if step else "Before training" for step in steps]
    head = "".join(f"<th>{name}</th>" for name in ["Prompt", "Expected", *names])
    body = "".join(
        f"<tr><td>{_code(row[-1].prompt)}</td><td>{_code(row[-1].ground_truth)}</td>"
        + "".join(f"<td>{_code(sample.response)}<small>{_reward(sample)}</small></td>" for sample in row)
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _card("Sample responses", f'<div class="scroll">{table}</div>', "full")


def _run_table(values: Mapping[str, Any]) -> str:
    """Table of the run's identity and platform, as far as known."""
    shown = {
        "Algorithm": values.get("algorithm"),
        "Command line": values.get("command_line"),
        "Version": " ".join(str(values[key]) for key in ("version", "commit") if values.get(key)),
        "Started": values.get("started"),
        **{f"Service {name}": _service_text(each) for name, each in values.get("services", {}).items()},
    }
    rows = (
        f"<tr><th>{_escape(title)}</th><td>{_code(str(text))}</td></tr>"
        for title, text in shown.items()
        if text
    )
    body = "".join(rows)
    return body and _card(
        "The run", f'<div class="scroll"><table><tbody>{body}</tbody></table></div>', "full"
    )


def _service_text(service: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in service.items() if value)


def _config(text: str) -> str:
    if not text:
        return ""
    return _card(
        "Configuration",
        f"<details><summary>As resolved</summary><pre>{_escape(text)}</pre></details>",
        "full",
    )


def _card(title: str, content: str, kind: str = "", note: str = "") -> str:
    below = f'<p class="note">{_escape(note)}</p>' if note else ""
    return f'<section class="card {kind}"><h2>{_escape(title)}</h2>{content}{below}</section>'


def _reward(sample: Sample) -> str:
    return f"reward {figure_text(sample.reward)}"


def _escape(text: str) -> str:
    """Text for HTML; characters that have no place in it, which a policy may well sample, become U+FFFD."""
    return html.escape(_NOT_IN_HTML.sub("\N{REPLACEMENT CHARACTER}", text))


def _code(text: str) -> str:
    return f"<code>{_escape(text)}</code>"


def _long(text: str) -> str:
    return ' class="long"' if len(text) > 20 else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise RlhfError(f"{path}: not JSON: {error}") from None


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #22272b; --muted: #69737b; --rule: #e6e7e6;
  --c0: #2c6fae; --c1: #c46a24; --c2: #3b8a67; --c3: #8460b0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2023; --ink: #e2e5e7; --muted: #98a2a9; --rule: #2f353a;
    --c0: #6cabe3; --c1: #e39a5e; --c2: #6cbd97; --c3: #b496dc;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main {
  max-width: 1060px; margin: 0 auto; padding: 32px 20px 64px;
  display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px;
}
header, .tiles, .full, main > .note { grid-column: 1 / -1; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 14px; }
h1 { font-size: 24px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; font-weight: 600; margin: 0 0 10px; }
.state, .note { color: var(--muted); margin: 0; font-size: 14px; }
.note { margin-top: 10px; }
.tiles { display: flex; flex-wrap: wrap; gap: 20px 40px; margin: 0 0 4px; }
.tiles dt { color: var(--muted); font-size: 14px; }
.tiles dd { margin: 0; font-size: 24px; font-variant-numeric: tabular-nums; }
.tiles .long dd { font: 13px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; padding-top: 6px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; }
.narrow { display: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--muted); }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td small { display: block; color: var(--muted); }
code, pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { margin: 10px 0 0; }
summary { cursor: pointer; color: var(--muted); }
@media (max-width: 760px) {
  main { grid-template-columns: minmax(0, 1fr); padding: 20px 12px 40px; gap: 14px; }
  .card { padding: 14px; }
  .wide { display: none; }
  .narrow { display: block; }
}
"""
