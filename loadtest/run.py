"""A load test from its settings to its result."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest import analysis, slo
from loadtest.caller import OK, Caller
from loadtest.generator import Generator, Sending
from loadtest.histogram import Histogram
from loadtest.methods import find_method
from loadtest.payloads import Lengths, Shape, read_rows
from loadtest.recorder import StepRecorder, Window
from loadtest.requests import make_requests
from loadtest.schedule import Arrivals, arrivals
from loadtest.target import Target
from rlhf.contract import Method
from rlhf.errors import ConfigError

FORMAT = 1
MOST_INTERVALS = 120
LAST_TRIES = 2
"""Number of successive levels that are not sustained after which a ramp ends; a single one may be a disturbance of
the machine."""
EIGHT = Lengths(8, 8)

Json = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of a load test.

    Attributes:
        role, target, method: The service's role, host:port of rank 0, name of the method.
        arrivals: "poisson" or "constant" for an open loop, "closed" for a closed one.
        levels: Calls per second, or calls at the same time in a closed loop; several for a ramp.
        duration_s: Measured time of each level in seconds.
        warmup_s: Time under load before the measured time, in seconds.
        drain_s: Longest time, in seconds, to wait for answers after the last call.
        timeout_s: Timeout of a call in seconds.
        connections: Number of connections to each rank.
        rows, prompt, response, vocabulary, seed: Shape of the rows; see `payloads.Shape`.
        data: JSONL file with rows; None: made-up rows.
        objectives: Service level objectives, which decide the exit code; see `slo.parse`.
    """

    role: str
    target: str
    method: str
    arrivals: Arrivals | str
    levels: tuple[float, ...]
    duration_s: float = 10.0
    warmup_s: float = 1.0
    drain_s: float = 5.0
    timeout_s: float = 60.0
    connections: int = 1
    rows: int = 1
    prompt: Lengths = EIGHT
    response: Lengths = EIGHT
    vocabulary: int = 100
    seed: int = 0
    data: Path | None = None
    objectives: str = ""

    @property
    def is_closed(self) -> bool:
        return self.arrivals == "closed"

    @property
    def is_ramp(self) -> bool:
        return len(self.levels) > 1


async def measure(settings: Settings, tell: Callable[[Json], None], stop: asyncio.Event) -> Json:
    """Runs all levels and returns the result as JSON values. A ramp ends after `LAST_TRIES` successive levels that
    the service does not sustain.

    Args:
        settings: Settings of the load test.
        tell: Called with the figures of each step when it has ended.
        stop: Event that ends the test: when it is set, the result has what was measured so far.

    Raises:
        RlhfError: The settings do not fit the service, or it does not answer.
    """
    method = find_method(settings.role, settings.method)
    objectives = slo.parse(settings.objectives)
    if settings.data:
        read_rows(settings.data)  # before anything is asked of the service
    began = time.time()
    steps: list[Json] = []
    target = await Target.find(settings.target, settings.role, settings.connections)
    _check_deadline(settings, target)
    shape = Shape(settings.rows, settings.prompt, settings.response, settings.vocabulary, settings.seed)
    requests = make_requests(target, method, shape, settings.data)
    for level in settings.levels:
        caller = Caller(target, method, requests, settings.timeout_s)
        recorder, sending = await _run_step(settings, level, caller, stop)
        steps.append(_step_figures(settings, level, recorder, sending, caller, objectives))
        tell(steps[-1])
        tries = steps[-LAST_TRIES:]
        if sending.interrupted or (len(tries) == LAST_TRIES and not any(step["sustained"] for step in tries)):
            break
    levels = [_level(step) for step in steps]
    knee = analysis.knee(levels) if settings.is_ramp else None
    capacity = analysis.capacity(levels) if settings.is_ramp else None
    return {
        "format": FORMAT,
        "started_unix_s": began,
        "interrupted": stop.is_set(),
        "settings": _plain(settings),
        "service": _service_figures(target, method),
        "tester": {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
        },
        "steps": steps,
        "knee": asdict(knee) if knee else None,
        "capacity": asdict(capacity) if capacity else None,
    }


@contextmanager
def stopping_on_signals(stop: asyncio.Event) -> Iterator[list[int]]:
    """Context manager that sets `stop` at SIGINT and SIGTERM, instead of ending the process; yields a list to which the
    numbers of received signals are appended. Needs a running event loop."""
    loop, came = asyncio.get_running_loop(), []

    def note(number: int) -> None:
        came.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    try:
        yield came
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _run_step(
    settings: Settings, level: float, caller: Caller, stop: asyncio.Event
) -> tuple[StepRecorder, Sending]:
    async with caller:
        start_s = asyncio.get_running_loop().time()
        measured_s = start_s + settings.warmup_s
        window = Window(measured_s, measured_s + settings.duration_s)
        recorder = StepRecorder(window, max(1.0, settings.duration_s / MOST_INTERVALS))
        generator = Generator(caller, recorder, settings.drain_s, stop)
        if settings.is_closed:
            return recorder, await generator.closed_loop(round(level))
        kind: Any = settings.arrivals
        return recorder, await generator.open_loop(start_s, arrivals(kind, level, settings.seed))


def _check_deadline(settings: Settings, target: Target) -> None:
    needed_s = settings.warmup_s + settings.duration_s + settings.drain_s
    if target.num_ranks > 1 and settings.timeout_s < needed_s:
        raise ConfigError(
            f"--timeout: must be at least {needed_s:g} s, the sum of warm-up, duration and drain: the service has "
            f"{target.num_ranks} ranks, and a call that exceeds its deadline on only one of them ends the service"
        )


def _step_figures(
    settings: Settings,
    level: float,
    recorder: StepRecorder,
    sending: Sending,
    caller: Caller,
    objectives: list[slo.Objective],
) -> Json:
    window_s = max(recorder.window.length_s, 1e-9)
    errors = {code: count for code, count in sorted(recorder.codes.items()) if code != OK}
    latency, server = recorder.latency, recorder.server
    kept_up = analysis.is_sustained(
        recorder.sent, recorder.kept_up, sum(errors.values()), closed=settings.is_closed
    )
    warnings = analysis.generator_warnings(
        recorder.lag.percentile_s(99), latency.percentile_s(99), sending.busy
    )
    sustained = kept_up and not sending.overrun
    if sustained:
        warnings += analysis.warmup_warnings(settings.warmup_s, latency.percentile_s(50), window_s)
    step: Json = {
        "level": level,
        "window_s": window_s,
        "sent": recorder.sent,
        "sent_per_s": recorder.sent / window_s,
        "ended": sum(recorder.codes.values()),
        "answered": recorder.answered,
        "throughput_per_s": recorder.answered / window_s,
        "rows_per_s": recorder.answered * settings.rows / window_s,
        "errors": errors,
        "causes": {code: cause for code, cause in caller.causes.items() if code in errors},
        "latency_s": _summary(latency),
        "server_s": {part: _summary(histogram) for part, histogram in server.items() if histogram.count},
        "rest_s": _summary(recorder.rest),
        "expected_queue_s": _expected_queue(settings, recorder),
        "lag_s": _summary(recorder.lag),
        "busy": sending.busy,
        "warnings": warnings,
        "overrun": sending.overrun,
        "sustained": sustained,
        "testers_limit": not sustained and analysis.is_generator_limit(recorder.lag.mean_s, latency.mean_s),
        "timeline": recorder.timeline(),
        "curve": latency.curve() if latency.count else [],
        "histogram": latency.encoded(),
    }
    verdicts = slo.judge(objectives, step, latency.percentile_s)
    step["objectives"] = [
        {"objective": verdict.objective.text, "measured": verdict.measured, "met": verdict.met}
        for verdict in verdicts
    ]
    return step


def _summary(histogram: Histogram) -> dict[str, float]:
    return histogram.summary() if histogram.count else {}


def _expected_queue(settings: Settings, recorder: StepRecorder) -> float | None:
    """Returns the expected waiting time in seconds in the queue of a single server with the measured computing times;
    None where arrivals are not Poisson, the ranks report no times, or the load is 1 or more."""
    compute = recorder.server["compute"]
    if settings.arrivals != "poisson" or not compute.count:
        return None
    rate = recorder.sent / max(recorder.window.length_s, 1e-9)
    wait_s = analysis.mean_wait_s(rate, compute.mean_s, compute.variance_s2)
    return wait_s if wait_s < float("inf") else None


def _level(step: Json) -> analysis.Level:
    mean_s = step["latency_s"].get("mean", 0.0)
    return analysis.Level(step["level"], step["throughput_per_s"], mean_s, step["sustained"])


def _service_figures(target: Target, method: Method) -> Json:
    said = target.description
    described = {
        "service": said.service, "version": said.version, "engine": said.engine, "threads": said.threads,
        "parameters": said.parameters, "mesh": str(target.mesh),
    } if said else {}  # fmt: skip
    return {
        "method": method.path,
        "ranks": target.num_ranks,
        "describes_itself": said is not None,
        **described,
    }


def _plain(settings: Settings) -> Json:
    found = asdict(settings)
    found["data"] = str(settings.data) if settings.data else None
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
