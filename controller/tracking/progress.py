"""Progress of a run on the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reports.units import bytes_text, duration_text, figure_text, percent_text


@dataclass
class Status:
    """Status of the run."""

    total_steps: int = 0
    step: int = 0
    """Steps done."""
    elapsed_s: float = 0.0
    """Since `begin`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of every metric."""
    first: dict[str, float] = field(default_factory=dict)
    """The first value of every metric of evaluations."""
    running: dict[str, str] = field(default_factory=dict)
    """By running call, "service.method", its progress as in "12/64"; empty where unknown."""
    memory: dict[str, float] = field(default_factory=dict)
    """Bytes by service."""


class Progress:
    """Live display on a terminal; elsewhere one plain line per step.

    A context manager that restores the terminal, whatever ends it. All methods may be called from any thread, also
    after the end, when only plain lines of `step` and `message` are shown.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            console: default: standard output.
            clock: time in seconds, from which the remaining time is estimated.
        """
        # By default, rich takes a pipe with FORCE_COLOR for a terminal.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._clock = clock
        self._lock = threading.Lock()
        self._status = Status()
        self._began_s = clock()
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
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

    def begin(self, total_steps: int) -> None:
        """The run starts now, with this number of steps."""
        with self._lock:
            self._status.total_steps = total_steps
            self._began_s = self._clock()

    def stage(self, running: Mapping[str, str]) -> None:
        """Sets the running calls, "service.method", with "done/total", or "" where unknown."""
        with self._lock:
            self._status.running = dict(running)

    def memory(self, service: str, num_bytes: float) -> None:
        """Shows the memory that a service uses, host and device, in bytes over all its ranks."""
        with self._lock:
            self._status.memory[service] = num_bytes

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step (0: the evaluation before training), with the metrics of `metrics.jsonl`."""
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
        """Shows a line of text above the display."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            self._status.elapsed_s = self._clock() - self._began_s
            return display(self._status)


def step_line(step: int, total_steps: int, metrics: Mapping[str, float]) -> str:
    """A step in one plain line, with the metrics that it has."""
    parts = [f"step {step}/{total_steps}", *figures(metrics)]
    if "time/step_s" in metrics:
        parts.append(f"{metrics['time/step_s']:.2f} s")
    return "  ".join(parts)


def figures(metrics: Mapping[str, float], first: Mapping[str, float] | None = None) -> list[str]:
    """The known ones of the figures to watch: reward, KL, held-out metrics, tokens/s.

    Args:
        first: First values of the held-out metrics.
    """
    texts: dict[str, Callable[[float], str]] = {
        "reward/mean": lambda value: f"reward {value:.3f}",
        "kl/mean": lambda value: f"kl {figure_text(value)}",
        "evaluation/accuracy": lambda value: (
            f"held-out {_from('accuracy', percent_text)}{percent_text(value)}"
        ),
        "evaluation/reward": lambda value: (
            f"held-out reward {_from('reward', figure_text)}{figure_text(value)}"
        ),
        "evaluation/loss": lambda value: f"held-out loss {value:.3f}",
        "time/tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    }

    def _from(name: str, text: Callable[[float], str]) -> str:
        before = (first or {}).get(key := f"evaluation/{name}")
        return "" if before is None or before == metrics[key] else f"{text(before)} → "

    return [text(metrics[key]) for key, text in texts.items() if key in metrics]


def display(status: Status) -> RenderableType:
    """The live display: a bar over the steps, then figures, running calls and memory."""
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
    bar.add_row(
        Text(f"step {status.step}/{status.total_steps}", style="bold"),
        ProgressBar(total=max(1, status.total_steps), completed=status.step, width=32),
        Text(_times(status), style="dim"),
    )
    return bar


def _times(status: Status) -> str:
    elapsed = duration_text(status.elapsed_s)
    if not 0 < status.step < status.total_steps:
        return elapsed
    left_s = status.elapsed_s / status.step * (status.total_steps - status.step)
    return f"{elapsed}, about {duration_text(left_s)} left"
