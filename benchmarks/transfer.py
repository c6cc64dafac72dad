"""Times of rows from one process to another, each way beside its anchor, in turns within one run.

- Hand-off: one column over memfd on one host, from the tensor that a forward pass left to a reader that has
  touched every page; put, plan, attach and first touch apart. Beside a warm memcpy into memory of the same kind.
  Readers keep arenas mapped; where they ask for rows they may write to, pages are faulted in anew: printed apart too.
- Stream: one column over tcp on loopback, beside a raw socket that sends as many bytes.
- Batch: the columns that PPO trains on, 6.3 MB, by DP_PROTO to 1, 4 and 8 ranks that read every byte, beside verl's
  DP_COMPUTE_PROTO over Ray where both are installed.
- cuda_ipc: one column into the reader's device memory, on one GPU, beside a device-to-device copy: see
  `benchmarks.transfer_gpu`.
"""

# ruff: noqa: E402 - gRPC is told how to wait before it is imported

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path

import click

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()  # as ranks do, also in the processes started from here

import torch

from benchmarks.processes import process
from benchmarks.report import circumstances, json_option, write_json
from benchmarks.transfer_batch import measure_batch
from benchmarks.transfer_gpu import measure_cuda_ipc, torch_on_gpu
from benchmarks.transfer_host import measure_hand_off, measure_stream, run_producer
from benchmarks.transfer_tables import MIB, show
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcTransport

HAND_OFFS = (64 * MIB, 256 * MIB, 1024 * MIB)
STREAMS = (64 * MIB, 256 * MIB)
DEVICES = (64 * MIB, 256 * MIB, 1024 * MIB)
RANKS = (1, 4, 8)
PARTS = ("hand-off", "stream", "batch", "cuda_ipc")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, help="What is timed."
)
@click.option("--hand-off", "hand_offs", multiple=True, type=click.IntRange(MIB), default=HAND_OFFS)
@click.option("--stream", "streams", multiple=True, type=click.IntRange(MIB), default=STREAMS)
@click.option("--cuda-ipc", "devices", multiple=True, type=click.IntRange(MIB), default=DEVICES)
@click.option("--ranks", multiple=True, type=click.IntRange(1), default=RANKS, show_default=True)
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(1), help="Of each way.")
@json_option
def main(
    parts: tuple[str, ...],
    hand_offs: tuple[int, ...],
    streams: tuple[int, ...],
    devices: tuple[int, ...],
    ranks: tuple[int, ...],
    rounds: int,
    json_path: Path | None,
) -> None:
    """Time memfd, tcp, the dealing of a batch and cuda_ipc, each beside its anchor."""
    before = circumstances()
    hand_offs, streams, ranks, devices = (
        chosen if part in parts else ()
        for part, chosen in zip(PARTS, (hand_offs, streams, ranks, devices), strict=True)
    )
    with_verl = all(importlib.util.find_spec(name) for name in ("ray", "verl", "tensordict"))
    if ranks and not with_verl:
        click.echo("verl over Ray is left out: ray, verl and tensordict are not all installed")
    no_cuda_ipc = CudaIpcTransport().unavailable()
    if devices and no_cuda_ipc:
        click.echo(f"cuda_ipc is left out: {no_cuda_ipc}")
    try:
        with process(run_producer, max((0, *hand_offs, *streams)) + 64 * MIB) as producer:
            on_host = (
                [measure_hand_off(producer, nbytes, rounds) for nbytes in hand_offs],
                [measure_stream(producer, nbytes, rounds) for nbytes in streams],
                [figure for n in ranks for figure in measure_batch(producer, n, rounds, with_verl)],
            )
        taken = (*on_host, [] if no_cuda_ipc else measure_cuda_ipc(torch_on_gpu, devices, rounds))
    except KeyboardInterrupt:
        raise click.Abort from None
    show(*taken)
    names = ("hand_offs", "streams", "batches", "cuda_ipc")
    figures = {name: [asdict(f) for f in part] for name, part in zip(names, taken, strict=True)}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    write_json(json_path, {"before": before, "after": circumstances(), "gpu": gpu, **figures})


if __name__ == "__main__":
    main()
