"""Weights from a service to memory of another process on the same host, beside a memcpy of as many bytes.

The source is a rank of a service with a random Llama, in a process of its own. The receiver, another process, calls
SendWeights, reads the buckets as a receiving service does, and copies each slice to its place in tensors that it has.
The anchor is one warm memcpy there of as many bytes, from one array to another, in turns with the transfers.
"""

# ruff: noqa: E402 - gRPC is told how to wait before it is imported

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import click

from rlhf.polling import serve_from_one_thread

serve_from_one_thread()  # as ranks do, also in the processes started from here

import numpy as np
import torch
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.ports import free_port
from benchmarks.processes import TIMEOUT_S, ask, in_turns, process
from benchmarks.processes import receive as receive_from
from benchmarks.report import circumstances, console, json_option, write_json
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.weight_plans import RankWeights, WeightSlice, WeightTransfer, plan_weights
from nccl_transfer.refs.wire_ranks import endpoint_from_proto
from nccl_transfer.refs.wire_weights import slice_from_proto, transfer_to_proto
from nccl_transfer.registry import create_readers
from nccl_transfer.transports import host_id
from nccl_transfer.transports.common import stream_channel
from rlhf.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.reference.worker import ReferenceWorker
from services.runtime.huge_pages import use_huge_pages
from services.runtime.ranks import Ranks
from services.runtime.server import RankServer
from services.testing.single_rank import single_rank
from services.weights.receive import receive
from settings.reference import ReferenceTable

MIB = 1 << 20
LEAST_OF_MEMCPY = 0.6
LAYER_PARAMETERS = 4 * 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
"""Parameters of a layer of the model."""


@dataclass(frozen=True)
class Moved:
    """Seconds of transfers of one model, by round, and of a memcpy of as many bytes in the same rounds.

    Attributes:
        checksums: Whether the receiver verifies checksums of weights in place.
        nbytes: Bytes that the receiver reads.
        dtype: Element type in which the receiver wants the weights, which the source has in float32.
        transport: Name of the transport.
        bucket_bytes: Size of a bucket.
        plan_s: Seconds of one plan, which each side computes.
    """

    checksums: bool
    nbytes: int
    dtype: str
    transport: str
    bucket_bytes: int
    transfer_s: list[float]
    memcpy_s: list[float]
    plan_s: float

    @property
    def ratios(self) -> list[float]:
        """Rate over that of the memcpy, by round."""
        return [anchor / taken for anchor, taken in zip(self.memcpy_s, self.transfer_s, strict=True)]

    @property
    def of_memcpy(self) -> float:
        return statistics.median(self.ratios)


def build_model(directory: Path, mib: int) -> None:
    """Writes a random Llama of about `mib` MiB in float32, and a tokenizer."""
    layers = max(1, round(mib * MIB / 4 / LAYER_PARAMETERS))
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    backend = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)


def run_source(arguments: tuple[Path, str, int, bool], parent: Connection) -> None:
    """Body of the service's process: serves until the other end of the pipe closes."""
    model, address, arena_mb, checksums = arguments
    use_huge_pages()  # as ranks do
    table = ReferenceTable(
        role="reference",
        address=address,
        model=model,
        dtype="float32",
        arena_mb=arena_mb,
        checksums=checksums,
        matmul="mkl",
    )

    def end_with_parent() -> None:
        with contextlib.suppress(EOFError, OSError):
            parent.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as name, single_rank(torch.device("cpu"), Path(name)):
        worker = ReferenceWorker(table, Ranks(0, 1, 1))
        threading.Thread(target=end_with_parent, daemon=True).start()
        parent.send("ready")
        asyncio.run(RankServer(worker).serve())


class Receiver:
    """A process that lacks all weights of a service, and takes them on request."""

    def __init__(self, address: str) -> None:
        use_huge_pages()  # as ranks do
        torch.set_num_threads(1)
        self._stub = worker_pb2_grpc.WorkerServiceStub(stream_channel(address))
        described = self._stub.Describe(worker_pb2.DescribeRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
        self._endpoint = endpoint_from_proto(described.ranks[0].endpoint)
        request = worker_pb2.DescribeWeightsRequest(call=_call())
        slices = self._stub.DescribeWeights(request, timeout=TIMEOUT_S).slices
        self._held = tuple(map(slice_from_proto, slices))
        self._anchor: tuple[np.ndarray, np.ndarray] = (np.empty(0), np.empty(0))

    def prepare(self, dtype: str, transport: str, bucket_bytes: int) -> tuple[int, float]:
        """Makes the tensors that weights go to; returns their bytes, and the seconds of a plan."""
        wanted = [WeightSlice(each.name, each.shape, each.box, dtype) for each in self._held]
        self._targets = {
            each.name: torch.zeros(each.box.shape, dtype=getattr(torch, dtype)) for each in wanted
        }
        self._fetcher = Fetcher(host_id(), create_readers([transport]))
        source = RankWeights(self._endpoint, self._held)
        receiver = RankWeights(Endpoint("127.0.0.1:1", host_id()), tuple(wanted))
        self._transfer = WeightTransfer("plan", 0, bucket_bytes, (source,), (receiver,))
        nbytes = sum(each.nbytes for each in wanted)
        self._anchor = (np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32))
        began = time.perf_counter()
        plan_weights(self._transfer)
        return nbytes, time.perf_counter() - began

    def memcpy(self) -> float:
        """Seconds of the anchor."""
        began = time.perf_counter()
        np.copyto(self._anchor[1], self._anchor[0])
        return time.perf_counter() - began

    def transfer(self) -> float:
        """Seconds of a transfer, from the call until both sides have ended."""
        transfer = replace(self._transfer, id=uuid.uuid4().hex)
        request = worker_pb2.SendWeightsRequest(call=_call(), transfer=transfer_to_proto(transfer))
        began = time.perf_counter()
        sent = self._stub.SendWeights.future(request, timeout=TIMEOUT_S)
        for piece, values in receive(transfer, 0, self._fetcher, time.monotonic() + TIMEOUT_S):
            place = tuple(map(slice, piece.box.starts, piece.box.stops))
            values.copy_to(self._targets[piece.name][place])
        sent.result()
        return time.perf_counter() - began

    def close(self) -> None:
        self._fetcher.close()


def _call() -> common_pb2.Call:
    return common_pb2.Call(call_id=uuid.uuid4().hex)


def run_receiver(address: str, parent: Connection) -> None:
    """Body of the receiver's process, which calls its methods on request until the other end of the pipe closes."""
    receiver = Receiver(address)
    parent.send("ready")
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        while True:
            method, *arguments = parent.recv()
            parent.send(getattr(receiver, method)(*arguments))


def measure(
    receiver: Connection, checksums: bool, dtype: str, transport: str, bucket_bytes: int, rounds: int
) -> Moved:
    nbytes, plan_s = ask(receiver, "prepare", dtype, transport, bucket_bytes)
    ways = {"transfer": lambda: ask(receiver, "transfer"), "memcpy": lambda: ask(receiver, "memcpy")}
    seconds = in_turns(ways, rounds)
    ask(receiver, "close")
    return Moved(
        checksums, nbytes, dtype, transport, bucket_bytes, seconds["transfer"], seconds["memcpy"], plan_s
    )


def table_of(figures: list[Moved]) -> Table:
    table = Table(title="Weights to another process on one host, medians")
    for name in (
        "weights",
        "wanted as",
        "transport",
        "checksums",
        "bucket",
        "plan",
        "transfer",
        "GB/s",
        "memcpy GB/s",
        "of memcpy",
    ):
        table.add_column(name, justify="right")
    for each in figures:
        transfer_s, memcpy_s = statistics.median(each.transfer_s), statistics.median(each.memcpy_s)
        table.add_row(
            f"{each.nbytes / MIB:.0f} MiB",
            each.dtype,
            each.transport,
            "verified" if each.checksums else "-",
            f"{each.bucket_bytes / MIB:g} MiB",
            f"{each.plan_s * 1e3:.1f} ms",
            f"{transfer_s * 1e3:.0f} ms",
            f"{each.nbytes / transfer_s / 1e9:.2f}",
            f"{each.nbytes / memcpy_s / 1e9:.2f}",
            f"{each.of_memcpy:.2f} [{min(each.ratios):.2f}-{max(each.ratios):.2f}]",
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--mib", default=1024, show_default=True, type=click.IntRange(64), help="Weights, in float32.")
@click.option(
    "--bucket-mib", "buckets", multiple=True, type=click.IntRange(1), default=(16,), show_default=True
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["float32", "bfloat16"]),
    default=("float32", "bfloat16"),
)
@click.option("--transport", "transports", multiple=True, default=("memfd",), show_default=True)
@click.option(
    "--checksums",
    default="both",
    show_default=True,
    type=click.Choice(["both", "no", "yes"]),
    help="Whether the source adds checksums to weights in place.",
)
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(1), help="Of each.")
@json_option
def main(
    mib: int,
    buckets: tuple[int, ...],
    dtypes: tuple[str, ...],
    transports: tuple[str, ...],
    checksums: str,
    rounds: int,
    json_path: Path | None,
) -> None:
    """Time transfers of weights, each beside a memcpy."""
    before = circumstances()
    figures: list[Moved] = []
    with tempfile.TemporaryDirectory() as name:
        build_model(Path(name), mib)
        arena_mb = 2 * max(buckets) + 16
        for verified in {"both": (False, True), "no": (False,), "yes": (True,)}[checksums]:
            address = f"127.0.0.1:{free_port()}"
            with process(run_source, (Path(name), address, arena_mb, verified)) as source:
                receive_from(source)
                with process(run_receiver, address) as receiver:
                    receive_from(receiver)
                    figures += [
                        measure(receiver, verified, dtype, transport, bucket * MIB, rounds)
                        for transport, dtype, bucket in product(transports, dtypes, buckets)
                    ]
    console().print(f"CPU: {before['cpu']}, {before['cores']} cores")
    console().print(table_of(figures))
    console().print(
        f"aim: at least {LEAST_OF_MEMCPY} of memcpy for float32 over memfd, on two cores that are free: "
        + ", ".join(
            f"{each.of_memcpy:.2f}"
            for each in figures
            if (each.dtype, each.transport, each.checksums) == ("float32", "memfd", False)
        )
    )
    write_json(
        json_path, {"before": before, "after": circumstances(), "weights": [asdict(f) for f in figures]}
    )


if __name__ == "__main__":
    main()
