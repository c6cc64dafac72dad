"""Display of a run's progress on the terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reports.units import bytes_text, duration_text, figure_text, percent_text

_KL = ("kl/mean", "actor/ref_kl")
"""Metrics with the KL to the reference: of rewards or advantages, or of the loss."""
_LOSS = ("dpo/loss", "reward/loss", "actor/loss")
"""Metrics with the training loss: of dpo, reward_model and sft."""


@dataclass
class Status:
    """Status of the run, which the display shows."""

    total_steps: int = 0
    """Number of steps of the run; 0 for an evaluation, which has none."""
    step: int = 0
    """Number of steps done."""
    elapsed_s: float = 0.0
    """Time since `Progress.begin`, in seconds."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each metric, by name."""
    first: dict[str, float] = field(default_factory=dict)
    """First value of each metric of evaluations, by name."""
    running: dict[str, str] = field(default_factory=dict)
    """Progress of each running call, such as "12/64", by "service.method"; empty where it is unknown."""
    memory: dict[str, float] = field(default_factory=dict)
    """Memory of each service, in bytes, by name."""
    first_step: int = 0
    """Number of steps that were done when the display began, those of the run before it was resumed."""


class Terminal(Console):
    """Console of a run, which goes on without it: where the program that reads its output has ended, the rest of the
    output of this process is dropped. In rich's `Console` this raises SystemExit on the thread that prints."""

    def on_broken_pipe(self) -> None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


class Progress:
    """Context manager that shows the progress of a run: a live display on a terminal, elsewhere one plain line per
    step.

    On exit it restores the terminal, also after an error. All methods may be called from any thread, also after the
    exit, when only the plain lines of `step` and `message` are shown.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        is_live: bool = True,
        has_steps: bool = True,
    ) -> None:
        """
        Args:
            console: Console to write to. Default: standard output.
            is_live: Whether to show a live display on a terminal. False: plain lines there too.
            has_steps: Whether the number of the step is shown. False: for an evaluation, which has no steps.
        """
        # By default, rich takes a pipe with FORCE_COLOR for a terminal, and writes HTML to a notebook.
        self._console = console or Terminal(force_terminal=sys.stdout.isatty(), force_jupyter=False)
        self._has_steps = has_steps
        self._lock = threading.Lock()
        self._status = Status()
        self._began_s = time.monotonic()
        self._live: Live | None = None
        if is_live and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stage({})
        if self._live:
            self._live.stop()

    def begin(self, total_steps: int, done: int = 0) -> None:
        """Records that the run starts now, with `total_steps` steps, of which `done` are done already."""
        with self._lock:
            self._status.total_steps = total_steps if self._has_steps else 0
            self._status.step = self._status.first_step = done
            self._began_s = time.monotonic()

    def stage(self, running: Mapping[str, str]) -> None:
        """Sets the progress of the running calls, "done/total" or empty where it is unknown, by "service.method"."""
        with self._lock:
            self._status.running = dict(running)

    def memory(self, service: str, num_bytes: float) -> None:
        """Sets the host and device memory that a service uses, in bytes, summed over its ranks."""
        with self._lock:
            self._status.memory[service] = num_bytes

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step, in the live display or as a plain line; 0 is the evaluation before training. `metrics`
        are those of `metrics.jsonl`."""
        with self._lock:
            status = self._status
            status.step = step
            status.metrics.update(metrics)
            evaluated = {key: value for key, value in metrics.items() if key.startswith("evaluation/")}
            status.first = evaluated | status.first
            line = step_line(step, status.total_steps, metrics)
        if not self._live:
            self._print(line)

    def message(self, text: str) -> None:
        """Prints a line of text, above the live display where there is one."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            self._status.elapsed_s = time.monotonic() - self._began_s
            return display(self._status)


def step_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """Returns a plain line of text for a step: its number, unless `total_steps` is 0, the metrics of `figures` that it
    has, and its duration."""
    parts = [f"step {step}/{total_steps}"] if total_steps else []
    parts += figures(metrics)
    if "time/step_s" in metrics:
        parts.append(f"{metrics['time/step_s']:.2f} s")
    return "  ".join(parts)


def figures(metrics: Mapping[str, float], first: Mapping[str, float] | None = None) -> list[str]:
    """Returns a text for each main metric that `metrics` has: reward, KL, held-out metrics and tokens/s, and where it
    has neither reward nor KL, as with sft, the training loss.

    Args:
        metrics: Metrics by name.
        first: First values of the held-out metrics by name, which are shown before the current ones. Default: none.
    """
    kl = _first_of(_KL, metrics)
    loss = "" if kl or "reward/mean" in metrics else _first_of(_LOSS, metrics)
    texts: dict[str, Callable[[float], str]] = {
        "reward/mean": lambda value: f"reward {value:.3f}",
        kl: lambda value: f"kl {figure_text(value)}",
        loss: lambda value: f"loss {figure_text(value)}",
        "evaluation/accuracy": lambda value: (
            f"held-out {_from('accuracy', percent_text)}{percent_text(value)}"
        ),
        "evaluation/reward": lambda value: (
            f"held-out reward {_from('reward', figure_text)}{figure_text(value)}"
        ),
        "evaluation/loss": lambda value: f"held-out loss {value:.3f}",
        "evaluation/reverse_kl": lambda value: f"held-out kl {figure_text(value)}",
        "time/tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    }

    def _from(name: str, text: Callable[[float], str]) -> str:
        before = (first or {}).get(key := f"evaluation/{name}")
        return "" if before is None or before == metrics[key] else f"{text(before)} → "

    return [text(metrics[key]) for key, text in texts.items() if key in metrics]


def _first_of(names: Sequence[str], metrics: Mapping[str, float]) -> str:
    """Returns the first of `names` that `metrics` has; empty where it has none."""
    return next((name for name in names if name in metrics), "")


def display(status: Status) -> RenderableType:
    """Makes the live display: a progress bar over the steps, if there are any, or the time alone; then main metrics,
    running calls and memory."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    for title, parts in (
        ("figures", figures(status.metrics, status.first)),
        ("running", [f"{call} {done}".rstrip() for call, done in status.running.items()]),
        ("memory", [f"{service} {bytes_text(taken)}" for service, taken in status.memory.items()]),
    ):
        rows.add_row(title, Text("  ·  ".join(parts) or "-"))
    return Group(_bar(status), rows)


def _bar(status: Status) -> Table:
    bar = Table.grid(padding=(0, 2))
    if not status.total_steps:
        bar.add_row(Text(_times(status), style="dim"))
        return bar
    bar.add_row(
        Text(f"step {status.step}/{status.total_steps}", style="bold"),
        ProgressBar(total=max(1, status.total_steps), completed=status.step, width=32),
        Text(_times(status), style="dim"),
    )
    return bar


def _times(status: Status) -> str:
    elapsed = duration_text(status.elapsed_s)
    if not status.first_step < status.step < status.total_steps:
        return elapsed
    left_s = status.elapsed_s / (status.step - status.first_step) * (status.total_steps - status.step)
    return f"{elapsed}, about {duration_text(left_s)} left"
