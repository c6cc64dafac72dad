"""Draws the pictures of docs/transfer.md from what the protocols and plans do: `python docs/draw_protocols.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import needed, plan_relays
from nccl_transfer.refs.protocols import TransferProtocol, get_protocol
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard, ShardRun

PAGE = Path(__file__).with_name("transfer.md")
BEGIN, END = "<!-- drawn by docs/draw_protocols.py -->\n", "<!-- end of the drawings -->\n"

MESH = Mesh(2, 2, 2, 1, 2)
ROWS = "abcdefgh"
PROTOCOLS = (
    "ONE_TO_ALL", "3D_PROTO", "3D_ALL_MICRO_DP", "3D_PP_AS_DP", "3D_PP_ONLY", "DP_PROTO", "DP_METRIC", "ALL_TO_ALL",
)  # fmt: skip


def render() -> str:
    """All pictures, as they stand on the page."""
    alike: dict[str, list[str]] = {}
    for name in PROTOCOLS:
        protocol = get_protocol(name)
        result = "rows" if protocol.splits else "one per rank"
        alike.setdefault(draw(protocol), []).append(f"{name} (result: {result})")
    pictures = [f"{', '.join(names)}\n\n{picture}" for picture, names in alike.items()]
    return "\n".join(f"```\n{picture}\n```\n" for picture in (*pictures, draw_relay()))


def draw(protocol: TransferProtocol) -> str:
    """Which rows go to each rank, and which ranks' outputs come back, in which order."""
    collected, lines = protocol.collect(MESH), []
    for rank, part in enumerate(protocol.distribute(len(ROWS), MESH)):
        rows = "".join(ROWS[row] for row in part.tolist())
        (stage, tensor, data), replica = MESH.position(rank), MESH.generation_position(rank)[2]
        place = f"rank {rank}  p{stage} t{tensor} d{data}  replica {replica}"
        back = f"  -- {rows} --> [{collected.index(rank)}]" if rank in collected else ""
        lines.append(f"-- {rows} --> {place}{back}")
    return "\n".join(fork(ROWS, lines))


def draw_relay() -> str:
    """3D_PROTO with ranks 0 to 3 on the host of the rows and 4 to 7 on another, with the relays of `plan_relays`."""
    here, there = "host A", "host B"
    source = Endpoint("holder:1", here)
    ranks = [Endpoint(f"{rank}:1", here if rank < 4 else there, rank=rank) for rank in range(MESH.size)]
    rows = get_protocol("3D_PROTO").distribute(len(ROWS), MESH)
    crossing = letters(needed(held(source).take(rows[4]))[source])
    (relay,) = plan_relays(held(source).take(rows[4]), ranks[4:])
    reader = relay.reader
    reads = [(ranks[rank], letters(needed(held(source).take(rows[rank]))[source])) for rank in range(4)]
    takes = [f"-- {crossing}, memfd --> rank {rank.rank}" for rank in ranks[4:] if rank != reader]
    near = [f"-- {rows}, memfd --> rank {rank.rank}" for rank, rows in reads]
    left = fork(f"the rows: {ROWS}", [*near, f"-- {crossing}, tcp "])
    width = max(map(len, left)) + 2
    left[-1] = left[-1].ljust(width, "-")
    right = fork(f"--> rank {reader.rank}", takes)
    over = [*[""] * len(near), *right]
    left += [""] * (len(over) - len(left))
    return "\n".join(
        [
            f"3D_PROTO over two hosts: of {ROWS}, {crossing} crosses, and crosses once",
            "",
            f"{here:{width}}|   {there}",
            *(f"{a:{width}}|{b}".rstrip() for a, b in zip(left, over, strict=True)),
        ]
    )


def held(holder: Endpoint) -> Batch:
    """The rows, a byte each, at a rank."""
    shard = Shard(holder, 1, 0, len(ROWS))
    return Batch(len(ROWS), {"x": RemoteColumn("uint8", (), None, ShardRun(shard, len(ROWS), 0, len(ROWS)))})


def letters(ranges: Sequence[ByteRange]) -> str:
    """The rows that ranges of `held` are."""
    return "".join(ROWS[r.start : r.start + r.nbytes] for r in ranges)


def fork(root: str, branches: Sequence[str]) -> list[str]:
    """A line per branch, all of them from one root."""
    lines = []
    for number, branch in enumerate(branches):
        joint = "+" if number in (0, len(branches) - 1) else "|"
        lines.append(f"{root + ' --' if number == 0 else '':{len(root) + 3}}{joint}{branch}")
    return lines


def redraw(page: str) -> str:
    """The page with its pictures drawn anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(redraw(PAGE.read_text()))
