"""Results of the three steps: figures, bars, and a page that links their reports."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reports.page import card, code, escape, page, table

KL = "kl/sequence_mean"


def summarize(runs: Mapping[str, Path], wall_s: float) -> dict[str, Any]:
    """Returns the figures of all steps, read from their run directories, by step, and `wall_s`.

    Args:
        runs: Run directory of each step, by name of the step.
        wall_s: Wall time of the whole pipeline in seconds.
    """
    sft, pairs, ppo = (_read(runs[name] / "summary.json") for name in ("sft", "reward_model", "ppo"))
    lines = [json.loads(line) for line in (runs["ppo"] / "metrics.jsonl").read_text().splitlines()]
    return {
        "sft": {"loss_before": sft["loss_before"], "loss_after": sft["loss_after"], "wall_s": sft["wall_s"]},
        "reward_model": {
            "accuracy": pairs["accuracy_after"],
            "accuracy_low": pairs["accuracy_low_after"],
            "accuracy_high": pairs["accuracy_high_after"],
            "pairs": int(pairs["pairs_after"]),
            "wall_s": pairs["wall_s"],
        },
        "ppo": {
            "reward_before": ppo["reward_before"],
            "reward_after": ppo["reward_after"],
            "kl": next((line[KL] for line in reversed(lines) if KL in line), None),
            "wall_s": ppo["wall_s"],
        },
        "wall_s": wall_s,
    }


def check(summary: Mapping[str, Any]) -> dict[str, tuple[bool, str]]:
    """Returns for each bar, the criterion that a step has to meet, whether it is met, and its figures as text."""
    sft, pairs, ppo = summary["sft"], summary["reward_model"], summary["ppo"]
    interval = f"{pairs['accuracy_low']:.1%} to {pairs['accuracy_high']:.1%}"
    return {
        "SFT: the held-out loss falls": (
            sft["loss_after"] < sft["loss_before"],
            f"{sft['loss_before']:.3f} to {sft['loss_after']:.3f} nats per token",
        ),
        "Reward model: held-out pairs in the right order, 95 % interval above one half": (
            pairs["accuracy_low"] > 0.5,
            f"{pairs['accuracy']:.1%} of {pairs['pairs']} ({interval})",
        ),
        "PPO: the mean held-out reward rises": (
            ppo["reward_after"] > ppo["reward_before"],
            f"{ppo['reward_before']:.3f} to {ppo['reward_after']:.3f}, KL per response {ppo['kl']:.2f} nats",
        ),
    }


def render(directory: Path, runs: Mapping[str, Path], summary: Mapping[str, Any]) -> str:
    """Renders an HTML page with the bars of `check`, the figures of each step, links to their reports, relative to
    `directory`, and responses before and after PPO."""
    bars = [
        [escape(name), escape(text), "met" if held else "MISSED"]
        for name, (held, text) in check(summary).items()
    ]
    steps = [
        [escape(name), escape(_figures(summary[name])), _link(path / "report.html", directory)]
        for name, path in runs.items()
    ]
    samples = [[code(text) for text in texts] for texts in before_and_after(runs["ppo"])]
    sections = [
        f"<header><h1>{escape(directory.name)}</h1></header>",
        card("Bars", table(["bar", "measured", ""], bars), is_wide=True),
        card("Steps", table(["step", "figures", "report"], steps), is_wide=True),
        card(
            "Held-out prompts, before and after PPO",
            table(["prompt", "SFT policy", "after PPO"], samples),
            is_wide=True,
        ),
    ]
    return page(directory.name, sections)


def before_and_after(run: Path) -> list[tuple[str, str, str]]:
    """Returns (prompt, first response, last response), each response with its reward, for each prompt that has a sample
    both at step 0 and at the last step of samples.jsonl in run directory `run`."""
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    last = max((row["step"] for row in rows), default=0)
    first = {row["prompt"]: row for row in rows if row["step"] == 0}
    return [
        (row["prompt"].strip(), _answer(first[row["prompt"]]), _answer(row))
        for row in rows
        if row["step"] == last and row["prompt"] in first
    ]


def _answer(row: Mapping[str, Any]) -> str:
    return f"{row['response'].strip()}\n[{row['reward']:.2f}]"


def _figures(figures: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)


def _link(report: Path, directory: Path) -> str:
    return f'<a href="{escape(os.path.relpath(report, directory))}">report</a>'


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
