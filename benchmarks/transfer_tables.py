"""The tables of `benchmarks.transfer`, and its aims."""

from __future__ import annotations

from rich.table import Table

from benchmarks.report import console
from benchmarks.transfer_batch import VERL, Dealt
from benchmarks.transfer_gpu import DeviceTransfer
from benchmarks.transfer_host import HandOff, Stream

MIB = 1 << 20
MOST_ATTACH_S, LEAST_OF_MEMCPY, LEAST_OF_SOCKET, LEAST_OF_VERL, LEAST_OF_COPY = 0.005, 0.8, 0.7, 8.0, 0.8


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def gb_per_s(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f}"


def show(
    hand_offs: list[HandOff], streams: list[Stream], dealt: list[Dealt], devices: list[DeviceTransfer]
) -> None:
    """The tables of what was measured, and what came of the aims."""
    if hand_offs:
        console().print(hand_off_table(hand_offs))
    if streams:
        console().print(stream_table(streams))
    if dealt:
        console().print(dealt_table(dealt))
    if devices:
        console().print(device_table(devices))
    for line in aims(hand_offs, streams, dealt, devices):
        console().print(line)


def hand_off_table(hand_offs: list[HandOff]) -> Table:
    table = Table(title="Hand-off over memfd on one host, milliseconds")
    for name in (
        "size",
        "put",
        "plan",
        "attach",
        "first touch",
        "total",
        "memcpy",
        "put / memcpy",
        "writable: attach",
        "first touch",
        "total",
    ):
        table.add_column(name, justify="right")
    for h in hand_offs:
        times = (h.put_s, h.plan_s, h.attach_s, h.first_touch_s, h.total_s, h.memcpy_s)
        writable = (h.writable_attach_s, h.writable_first_touch_s, h.writable_total_s)
        table.add_row(size(h.nbytes), *map(ms, times), f"{h.put_of_memcpy:.2f}", *map(ms, writable))
    return table


def stream_table(streams: list[Stream]) -> Table:
    table = Table(title="Stream over tcp on loopback, milliseconds")
    for name in ("size", "tcp", "GB/s", "raw socket", "rate / raw socket"):
        table.add_column(name, justify="right")
    for s in streams:
        table.add_row(
            size(s.nbytes), ms(s.tcp_s), gb_per_s(s.nbytes, s.tcp_s), ms(s.socket_s), f"{s.of_socket:.2f}"
        )
    return table


def dealt_table(dealt: list[Dealt]) -> Table:
    table = Table(title="6.3 MB batch to all ranks, milliseconds")
    for name in ("ranks", "way", "median", "best"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for d in dealt:
        table.add_row(str(d.ranks), d.way, ms(d.median_s), ms(d.best_s))
    return table


def device_table(devices: list[DeviceTransfer]) -> Table:
    table = Table(title="cuda_ipc on one GPU, milliseconds")
    for name in (
        "size",
        "copy on the device",
        "from the arena",
        "GB/s",
        "rate / copy",
        "from host memory",
        "GB/s",
        "staging",
        "out of the slots",
        "allocation",
    ):
        table.add_column(name, justify="right")
    for d in devices:
        arena, host = (gb_per_s(d.nbytes, seconds) for seconds in (d.arena_s, d.receive_s))
        table.add_row(
            size(d.nbytes), ms(d.copy_s), ms(d.arena_s), arena, f"{d.arena_of_copy:.2f}", ms(d.receive_s), host,
            *map(ms, (d.staging_s, d.slots_s, d.allocation_s)),
        )  # fmt: skip
    return table


def aims(
    hand_offs: list[HandOff], streams: list[Stream], dealt: list[Dealt], devices: list[DeviceTransfer]
) -> list[str]:
    """The aims, and whether each was met."""

    def line(what: str, figure: str, met: bool) -> str:
        return f"{what}: {figure}: {'met' if met else 'missed'}"

    lines = []
    if hand_offs:
        attach = max(max(h.attach_s, h.writable_attach_s) for h in hand_offs)
        copy = min(h.put_of_memcpy for h in hand_offs)
        lines.append(line("attach under 5 ms at any size", f"{ms(attach)} ms", attach < MOST_ATTACH_S))
        lines.append(line("put at least 0.8 of memcpy", f"{copy:.2f}", copy >= LEAST_OF_MEMCPY))
    if streams:
        rate = min(s.of_socket for s in streams)
        lines.append(line("tcp at least 0.7 of a raw socket", f"{rate:.2f}", rate >= LEAST_OF_SOCKET))
    verl = {d.ranks: d.median_s for d in dealt if d.way == VERL}
    for d in dealt:
        if d.way != VERL and d.ranks in verl:
            ratio = verl[d.ranks] / d.median_s
            what = f"{d.way} to {d.ranks} ranks at least 8 times as fast as verl over Ray"
            lines.append(line(what, f"{ratio:.1f} times", ratio >= LEAST_OF_VERL))
    if devices:
        for d in devices:
            what = f"cuda_ipc of {size(d.nbytes)} on the GPU at least 0.8 of a device-to-device copy"
            lines.append(line(what, f"{d.arena_of_copy:.2f}", d.arena_of_copy >= LEAST_OF_COPY))
    return lines
