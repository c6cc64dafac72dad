"""CPU that a controller spends at the size of a cluster, on simulated ranks: real gRPC ports that compute nothing.

updates: one update_actor of many rows on 1-8-8: what building, serializing and sending the requests costs. With
    `--against CHECKOUT` the controller of another checkout makes the same call on the same machine, in turns.
no-ops: one synchronize to 1,024 ranks, beside the same messages over bare gRPC streams.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from benchmarks.report import circumstances, console, json_option, write_json

HERE = Path(__file__).resolve().parent
RANKS_PER_HOST = 8
LEAST_BETTER, MOST_OF_RAW = 30.0, 1.3
END_S = 20.0


@contextlib.contextmanager
def simulated(role: str, mesh: str) -> Iterator[int]:
    """Starts the ranks of a mesh; yields the port of rank 0."""
    arguments = ["--role", role, "--mesh", mesh, "--ranks-per-host", str(RANKS_PER_HOST)]
    command = [sys.executable, "-m", "benchmarks.simulated", *arguments]
    # gRPC would log streams that their clients drop at the end.
    with _piped(command, HERE.parent, stderr=subprocess.DEVNULL) as process:
        yield int(_line(process))


class ScaleClient:
    """A controller in a process of its own, which makes calls on request. A context manager.

    Args:
        checkout: Directory of the code that it runs, with a virtual environment in .venv.
        asked: As `benchmarks.scale_client.main` reads it.
    """

    def __init__(self, checkout: Path, **asked: Any) -> None:
        self._stack = contextlib.ExitStack()
        python = sys.executable if checkout == HERE.parent else str(checkout / ".venv/bin/python")
        self._command = [python, str(HERE / "scale_client.py")]
        self._checkout, self._asked = checkout, asked

    def __enter__(self) -> ScaleClient:
        self._process = self._stack.enter_context(_piped(self._command, self._checkout))
        self._ask(self._asked)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def cpu_ms(self, calls: int) -> float:
        """Milliseconds of CPU of a call, of the whole process, on average."""
        return self._ask({"calls": calls}) / calls * 1e3

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(_line(self._process))


@contextlib.contextmanager
def _piped(command: list[str], directory: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that ends when its standard input closes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=directory, **pipes, **options) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise click.ClickException("a process ended too early; see its output above")
    return line


def in_turns(clients: dict[str, ScaleClient], calls: int, turns: int) -> dict[str, list[float]]:
    """Milliseconds of CPU of a call by client, of each turn; a first turn is for warming up."""
    taken: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(turns + 1):
        for name, client in clients.items():
            cpu_ms = client.cpu_ms(calls)
            if turn:
                taken[name].append(round(cpu_ms, 2))
    return taken


def updates(rows: int, mesh: str, turns: int, against: Path | None) -> dict[str, list[float]]:
    """An update of many rows, by this code and by that of another checkout."""
    checkouts = {"this code": HERE.parent} | ({"the other": against.resolve()} if against else {})
    with contextlib.ExitStack() as stack:
        # Each has ranks of its own: a service has one session at a time.
        clients = {
            name: stack.enter_context(
                ScaleClient(
                    checkout,
                    port=stack.enter_context(simulated("actor", mesh)),
                    **_asked("updates", mesh, rows),
                )
            )
            for name, checkout in checkouts.items()
        }
        return in_turns(clients, 1, turns)


def no_ops(mesh: str, calls: int, turns: int) -> dict[str, list[float]]:
    """A call that does nothing, by a role group and by bare streams."""
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(
                ScaleClient(
                    HERE.parent, port=stack.enter_context(simulated("reward", mesh)), **_asked(name, mesh)
                )
            )
            for name in ("no-ops", "raw streams")
        }
        return in_turns(clients, calls, turns)


def _asked(system: str, mesh: str, rows: int = 0) -> dict[str, Any]:
    sizes = [int(size) for size in mesh.split("-")]
    return {"system": system, "mesh": sizes, "ranks_per_host": RANKS_PER_HOST, "rows": rows}


def ratio(of: list[float], over: list[float]) -> float:
    """Median of one client over that of another."""
    return round(statistics.median(of) / statistics.median(over), 3)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=8192, show_default=True, type=click.IntRange(1))
@click.option("--mesh", default="1-8-8", show_default=True, help="Of the update, p-t-d.")
@click.option("--ranks", default=1024, show_default=True, type=click.IntRange(1), help="Of the no-op.")
@click.option("--calls", default=20, show_default=True, type=click.IntRange(1), help="No-ops of a turn.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Checkout with a .venv whose controller makes the same update.",
)
@json_option
def main(
    rows: int, mesh: str, ranks: int, calls: int, turns: int, against: Path | None, json_path: Path | None
) -> None:
    """Measure the CPU of the controller's process for calls to many ranks."""
    before = circumstances()
    taken = {"updates": updates(rows, mesh, turns, against), "no-ops": no_ops(f"1-1-{ranks}", calls, turns)}
    table = Table(title="Milliseconds of the controller's CPU for a call")
    for name in ("call", "by", "median", "least", "most"):
        table.add_column(name, justify="left" if name in ("call", "by") else "right")
    titles = {"updates": f"update_actor, {rows:,} rows on {mesh}", "no-ops": f"synchronize, {ranks:,} ranks"}
    for part, systems in taken.items():
        for name, cpu_ms in systems.items():
            figures = (statistics.median(cpu_ms), min(cpu_ms), max(cpu_ms))
            table.add_row(titles[part], name, *(f"{figure:,.1f}" for figure in figures))
    screen = console()
    screen.print(table)
    ratios = {"no-ops over raw streams": ratio(taken["no-ops"]["no-ops"], taken["no-ops"]["raw streams"])}
    met = "met" if ratios["no-ops over raw streams"] <= MOST_OF_RAW else "missed"
    screen.print(
        f"no-ops over raw streams: {ratios['no-ops over raw streams']}, at most {MOST_OF_RAW}: {met}"
    )
    if against:
        better = ratios["updates, the other over this"] = ratio(
            taken["updates"]["the other"], taken["updates"]["this code"]
        )
        met = "met" if better >= LEAST_BETTER else "missed"
        screen.print(f"updates, the other checkout over this one: {better}, at least {LEAST_BETTER:g}: {met}")
    figures = {"cpu_ms": taken, "ratios": ratios, "rows": rows, "mesh": mesh, "ranks": ranks}
    write_json(json_path, {"before": before, "after": circumstances(), **figures})


if __name__ == "__main__":
    main()
