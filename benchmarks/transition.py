"""From training to generation on the same ranks: the paper's Table 2 (HybridFlow, section 5.4), measured.

Each transition runs on real ranks (gloo, one process each) between the same meshes. What a rank receives is counted at
its collectives and, where a network namespace can be made, by the counters of its loopback interface; the most memory
by the kernel's high-water mark. Where vLLM is installed, one more run shows what an engine holds that repacks weights.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import circumstances, console, json_option, write_json
from deploy import with_parent
from nccl_transfer.refs.mesh import Mesh

LABELS = {
    "gather_all": "DeepSpeed-Chat",
    "hybridflow_v": "HybridFlow-V",
    "hybridflow": "HybridFlow",
    "vllm": "HybridFlow, vLLM",
}
KINDS = ("gather_all", "hybridflow_v", "hybridflow")
VLLM_MESH = (1, 2, 2, 1, 1)
MESHES = ((1, 4, 2, 1, 2), (1, 2, 2, 1, 1), (2, 2, 2, 1, 1))
"""p, t, d, pg, tg: 1-4-2 to 1-2-2-2, 1-2-2 to 1-1-2-2, 2-2-2 to 1-1-4-2."""
TIMEOUT_S = 600.0
GRACE_S = 10.0
# The C library would keep what is freed, and the peak of one transition would hide in the next.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Formulas:
    """Table 2, as shares of the weights that are cut."""

    received: float
    peak: float
    redundant: float


def formulas(mesh: Mesh, kind: str) -> Formulas:
    """The paper's formulas for a transition. Training keeps 1/(t p) on each rank, replicated over d; where
    DeepSpeed-Chat shards it over d too, its redundancy is 1/(t p d)."""
    tp, generated = mesh.tensor * mesh.pipeline, mesh.replica_size
    if kind in ("hybridflow", "vllm"):
        # Repacked weights are copies.
        redundant = 0.0 if kind == "hybridflow" else 1 / tp
        return Formulas((tp - generated) / (generated * tp), 1 / generated, redundant)
    ranks = tp if kind == "hybridflow_v" else mesh.size
    return Formulas((ranks - 1) / ranks, 1.0, 1 / tp)


def write_model(directory: Path, hidden: int) -> None:
    """A Llama whose stages are even: embedding and output layer are of one size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


@contextlib.contextmanager
def namespace() -> Iterator[list[str]]:
    """Command prefix that runs a command in a network namespace of its own; empty where none can be made."""
    ip = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if os.geteuid() != 0 or ip is None:
        yield []
        return
    name = f"rlhf-transition-{os.getpid()}"
    if subprocess.run([ip, "netns", "add", name], capture_output=True).returncode:
        yield []
        return
    try:
        subprocess.run([ip, "-n", name, "link", "set", "lo", "up"], check=True)
        yield [ip, "netns", "exec", name]
    finally:
        subprocess.run([ip, "netns", "delete", name], check=True)


def run(
    directory: Path, ranks: int, cases: list[tuple[tuple[int, ...], str]], turns: int, prefix: list[str]
) -> Any:
    """The reports of all ranks of a launch, a list for each rank with one for each case."""
    (directory / "job.json").write_text(json.dumps({"ranks": ranks, "cases": cases, "turns": turns}))
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", "benchmarks.transition_ranks", "--rank", str(rank)]
            command = with_parent.wrap([*prefix, *command, "--directory", str(directory)])
            started.append(subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}))
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            process.kill()
            process.wait()
    if any(codes):
        raise click.ClickException(f"ranks ended with {codes}")
    return [json.loads((directory / f"report-{rank}.json").read_text()) for rank in range(ranks)]


def summary(mesh: Mesh, kind: str, reports: list[dict[str, Any]], alone: bool) -> dict[str, Any]:
    """Figures of a case over all its ranks."""
    expected, model = formulas(mesh, kind), reports[0]["model"]
    received = [report["received"] for report in reports]
    counted = sum(report["received"] + report["received_whole"] for report in reports)
    return {
        "mesh": str(mesh).partition(",")[0],
        "transition": kind,
        "model": model,
        "received": [min(received), max(received)],
        "received_formula": expected.received * model,
        "received_whole": max(report["received_whole"] for report in reports),
        "gathered": max(report["gathered"] for report in reports),
        "peak_formula": expected.peak * model,
        "redundant": max(report["redundant"] for report in reports),
        "redundant_formula": expected.redundant * model,
        "resident_peak": max(report["peak"] for report in reports),
        "wire_over_counted": reports[0]["on_wire"] / counted if alone and reports[0]["on_wire"] else None,
        "seconds": [max(turn) for turn in zip(*(report["seconds"] for report in reports), strict=True)],
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table(title="Training to generation, per rank, in MB (the formula in brackets)")
    for name in ("meshes", "transition"):
        table.add_column(name)
    for name in ("received", "most weights", "redundant", "resident peak", "wire / counted", "ms (turns)"):
        table.add_column(name, justify="right")
    for row in rows:
        least, most = row["received"]
        milliseconds = [1000 * seconds for seconds in row["seconds"]]
        table.add_row(
            row["mesh"],
            LABELS[row["transition"]],
            f"{_mb(least)}{'' if least == most else ' to ' + _mb(most)} ({_mb(row['received_formula'])})",
            f"{_mb(row['gathered'])} ({_mb(row['peak_formula'])})",
            f"{_mb(row['redundant'])} ({_mb(row['redundant_formula'])})",
            _mb(row["resident_peak"]),
            f"{row['wire_over_counted']:.4f}" if row["wire_over_counted"] else "-",
            f"{statistics.median(milliseconds):.0f} ({min(milliseconds):.0f} to {max(milliseconds):.0f})",
        )
    screen = console()
    screen.print(table)
    exact = all(row["received"] == [row["received_formula"]] * 2 for row in rows)
    screen.print(f"bytes received equal the formulas exactly: {'yes' if exact else 'no'}")
    ours = [row for row in rows if row["transition"] == "hybridflow"]
    most = max(row["gathered"] / row["peak_formula"] for row in ours)
    screen.print(
        f"HybridFlow: training shard and generation weights together, of M/(tg pg): {most:.4f} at most"
    )


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hidden", default=512, show_default=True, type=click.IntRange(64), help="Width of the model.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Gathers that are timed.")
@json_option
def main(hidden: int, turns: int, json_path: Path | None) -> None:
    """Measure the three transitions of Table 2 on three pairs of meshes."""
    before = circumstances()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, namespace() as prefix:
        directory = Path(scratch)
        write_model(directory / "small", 64)
        write_model(directory / "large", hidden)
        for ranks in sorted({Mesh(*sizes).size for sizes in MESHES}):
            cases = [(sizes, kind) for sizes in MESHES if Mesh(*sizes).size == ranks for kind in KINDS]
            if importlib.util.find_spec("vllm") and Mesh(*VLLM_MESH).size == ranks:
                cases.append((VLLM_MESH, "vllm"))
            reports = run(directory, ranks, cases, turns, prefix)
            for number, (sizes, kind) in enumerate(cases):
                mesh = Mesh(*sizes, usual_order=kind in ("hybridflow_v", "gather_all"))
                rows.append(summary(mesh, kind, [report[number] for report in reports], bool(prefix)))
    show(rows)
    write_json(json_path, {"before": before, "after": circumstances(), "hidden": hidden, "rows": rows})


if __name__ == "__main__":
    main()
