"""rlhf-loadtest: measures the throughput and latency of one service."""

from __future__ import annotations

import asyncio
import json
import selectors
import sys
from pathlib import Path
from typing import Any

import click

from loadtest import compare, page, slo, table
from loadtest.payloads import Lengths
from loadtest.run import Json, Settings, measure, stopping_on_signals
from loadtest.schedule import ramp
from rlhf.errors import ConfigError
from rlhf.file_limit import raise_file_limit
from settings.commands import address_given, errors_shown, write_file
from settings.security import security_option

OBJECTIVE_MISSED = 3
DEFAULT_RATE = 10.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@security_option
@click.version_option(package_name="rlhf-cluster")
@click.argument("role", required=False)
@click.option(
    "--target", metavar="HOST:PORT", callback=address_given, help="Where the service, or its rank 0, serves."
)
@click.option(
    "--method",
    metavar="NAME",
    help="Method of the role, such as ComputeReward or compute_values; or Synchronize, Describe, Check.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Open loop: calls per second. Default: 10, without --concurrency and --ramp.",
)
@click.option(
    "--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True,
    help="Open loop: independent clients, or equal gaps.",
)  # fmt: skip
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    metavar="N",
    help="Closed loop: number of callers, each with one call at a time.",
)
@click.option(
    "--ramp",
    "ramp_text",
    metavar="LOW:HIGH:STEPS",
    help="Rates in calls per second, or with --closed numbers of callers, to find the knee.",
)
@click.option("--closed", is_flag=True, help="The levels of --ramp are numbers of closed-loop callers.")
@click.option(
    "--duration",
    "duration_s",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.1),
    metavar="N",
    help="Seconds per level.",
)
@click.option(
    "--warmup",
    "warmup_s",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="N",
    help="Seconds of warm-up per level.",
)
@click.option(
    "--drain",
    "drain_s",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="N",
    help="Seconds to wait for late answers.",
)
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0.001),
    metavar="N",
    help="Seconds that a call may take.",
)
@click.option(
    "--connections",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Connections to each rank.",
)
@click.option(
    "--rows", default=1, show_default=True, type=click.IntRange(0), metavar="N", help="Rows per call."
)
@click.option(
    "--prompt-length",
    "prompt",
    default="8",
    show_default=True,
    metavar="N[-M]",
    help="Tokens, or characters of text, per prompt.",
)
@click.option(
    "--response-length",
    "response",
    default="8",
    show_default=True,
    metavar="N[-M]",
    help="Tokens, or characters of text, per response; for GenerateSequences their maximum.",
)
@click.option(
    "--vocabulary",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Token ids are below this number.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSONL file with the rows to send. Default: random rows.",
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed of arrival times and of generated rows."
)
@click.option(
    "--slo",
    "objectives",
    default="",
    metavar="BOUNDS",
    help="Objectives, such as p99=50ms,errors=0; the exit code is 3 if one is missed.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the result to this file.",
)
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a report to this file.",
)
@click.option(
    "--compare", "compared", nargs=2, type=click.Path(path_type=Path, dir_okay=False), metavar="A.json B.json",
    help="Compare two results side by side; send no calls.",
)  # fmt: skip
def main(
    compared: tuple[Path, Path] | None, json_path: Path | None, html_path: Path | None, **options: Any
) -> None:
    """Load one method of one service of ROLE, and report its latency and throughput.

    ROLE is actor, critic, reference, reward, rollout, values, or one that an installed package brings.

    Methods that change a service (updates, checkpoints, offloading) are not offered. A service of several ranks takes
    its calls from one session at a time: a test is refused while a run has the service.
    """
    raise_file_limit()
    with errors_shown():
        if compared:
            _compare(*compared)
            return
        result, signals = _run(_settings(**options))
        table.console().print(table.report(result))
        if json_path:
            write_file(json_path, json.dumps(result, indent=1) + "\n")
        if html_path:
            write_file(html_path, page.render(result))
    if signals:
        sys.exit(128 + signals[0])
    if not _objectives_met(result):
        sys.exit(OBJECTIVE_MISSED)


def _settings(
    *,
    role: str | None,
    target: str | None,
    method: str | None,
    rate: float | None,
    arrivals: str,
    concurrency: int | None,
    ramp_text: str | None,
    closed: bool,
    prompt: str,
    response: str,
    objectives: str,
    **rest: Any,
) -> Settings:
    if not role or not target or not method:
        raise ConfigError("ROLE, --target and --method must be given, or --compare")
    if sum(given is not None for given in (rate, concurrency, ramp_text)) > 1:
        raise ConfigError("--rate, --concurrency and --ramp exclude each other")
    if closed and ramp_text is None:
        raise ConfigError("--closed goes with --ramp; a closed loop of one level is --concurrency")
    slo.parse(objectives)
    if ramp_text is not None:
        levels = ramp(ramp_text)
        if closed:
            levels = sorted({float(max(round(level), 1)) for level in levels})
    else:
        levels = [float(concurrency or rate or DEFAULT_RATE)]
    return Settings(
        role=role,
        target=target,
        method=method,
        arrivals="closed" if concurrency or closed else arrivals,
        levels=tuple(levels),
        prompt=Lengths.parse(prompt),
        response=Lengths.parse(response),
        objectives=objectives,
        **rest,
    )


def _run(settings: Settings) -> tuple[Json, list[int]]:
    """Runs the load test to its end. Returns its result, and the numbers of the signals that ended it early, if any."""

    def tell(step: Json) -> None:
        if settings.is_ramp:
            click.echo(table.progress_line(step, settings.is_closed), err=True)

    async def run() -> tuple[Json, list[int]]:
        stop = asyncio.Event()
        with stopping_on_signals(stop) as signals:
            return await measure(settings, tell, stop), signals

    # epoll rounds a wait up to the next millisecond; select does not, so sends are on time.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(run())


def _objectives_met(result: Json) -> bool:
    """Whether all objectives were met: by the only step, or for a ramp by at least one step. True without objectives,
    False without steps."""
    return any(all(verdict["met"] for verdict in step["objectives"]) for step in result["steps"])


def _compare(before_path: Path, after_path: Path) -> None:
    before, after = compare.read(before_path), compare.read(after_path)
    found = compare.differences(before, after)
    if not found:
        levels = (", ".join(f"{step['level']:g}" for step in result["steps"]) for result in (before, after))
        raise ConfigError(f"--compare: no level is in both: {' against '.join(levels)}")
    screen = table.console()
    screen.print(f"A: {before_path}\nB: {after_path}", highlight=False, markup=False)
    for difference in compare.differing_settings(before, after):
        screen.print(f"not the same: {difference}", style="bold", highlight=False, markup=False)
    screen.print(compare.table(found))


if __name__ == "__main__":
    main()
