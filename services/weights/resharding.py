"""Moves the weights of a training engine that shards them over data ranks (fsdp, zero) to generation shards on the same
ranks, over their process group.

Every rank publishes which slices of the checkpoint's tensors it holds, so all ranks make the same plan. A transition
runs it a few tensors at a time: all slices of these, in rounds, in each of which a rank packs one bucket and sends it
to the ranks that lack it. Beside its generation shard a rank has memory for its bucket and for those that arrive in a
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.weight_plans import (
    LEAST_BUCKET_BYTES,
    Bucket,
    BucketPiece,
    Plan,
    RankWeights,
    WeightSlice,
    WeightTransfer,
    plan_weights,
)
from nccl_transfer.refs.wire_weights import slice_from_proto, slice_to_proto
from rlhf.v1 import worker_pb2
from services.engines.agreement import RunToEnd, all_or_none
from services.engines.base import TrainEngine
from services.engines.collectives import bytes_of_ranks
from services.engines.three_d.stage import layouts_of_directory
from services.weights.copying import Values, copy_values
from services.weights.packing import WeightPacker, slice_of
from services.weights.receive import Piece
from services.weights.wanted import generation_shards
from settings.families import FAMILIES

ROUND_BYTES = 32 << 20
"""Most bytes that a rank receives in a round, unless buckets would be below LEAST_BUCKET_BYTES."""
TOGETHER_BYTES = 64 << 20
"""Most bytes of a rank's generation shards that arrive together, unless one of them is larger."""


class Resharding:
    """The weights that ranks generate with on a mesh of their own, gathered from a training engine without one.

    It is the `GenerationShards` of these ranks and yields `rollout_weights` as `TrainEngine` does. Construction is
    collective over the default process group.

    Args:
        engine: Training engine of this rank; its `local_shards` are what is sent.
        directory: Hugging Face directory of the model.
        mesh: Mesh of the service, with the sizes of generation.
        dtype: Type of the generation weights.
        device: Device of this rank.
        round_bytes, together_bytes: As the constants of these names.

    Attributes:
        layouts: Layouts of all tensors on the generation mesh, by name.
        in_place: False: the shards have memory of their own, which is freed with them.
        received_bytes: Bytes that this rank has received from others since construction.

    Raises:
        ValueError: The model does not divide over the mesh, or is of another family than `FAMILIES`.
    """

    in_place = False

    def __init__(
        self,
        engine: TrainEngine,
        directory: Path,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device,
        round_bytes: int = ROUND_BYTES,
        together_bytes: int = TOGETHER_BYTES,
    ) -> None:
        if engine.config.model_type not in FAMILIES:
            raise ValueError(
                f"{directory} is a {engine.config.model_type}; ranks can share {', '.join(FAMILIES)} to generate"
            )
        self._engine, self._dtype, self._device = engine, dtype, device
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.layouts = layouts_of_directory(
            directory, pipeline=mesh.generation_pipeline, tensor=mesh.generation_tensor
        )
        wanted = [generation_shards(self.layouts, mesh, rank, dtype, device) for rank in range(num_ranks)]
        self._wanted = wanted[self._rank]
        held = _held_by_ranks(slice_of(name, shard) for name, shard in engine.local_shards())
        self._bucket_bytes = max(LEAST_BUCKET_BYTES, round_bytes // num_ranks // 16 * 16)
        wants = [each.slices() for each in wanted]
        self._plans = list(_plans(held, wants, self._bucket_bytes, together_bytes))
        self.received_bytes = 0
        # Creates the communicator of the group, which in a batch of sends and receives NCCL would await from all ranks.
        dist.all_reduce(torch.zeros(1, device=device))

    @property
    def generation_shards(self) -> Resharding:
        """This object, as the attribute of a training engine with a mesh."""
        return self

    def generation_memory(self) -> Callable[[str], Tensor]:
        """Returns a function that maps the name of a generation weight to a placeholder of its shape on the device,
        which takes no memory and must not be written."""

        def memory(name: str) -> Tensor:
            nothing = torch.empty(1, dtype=self._dtype, device=self._device)
            return nothing.expand(self.layouts[name].kept_shape)

        return memory

    @torch.no_grad()
    def rollout_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and tensor of each generation shard of this rank, in new memory. The iterator is collective: run
        it to its end on every rank. If it fails on a rank, it raises on every rank, at its end at the latest."""
        self._engine.check_onloaded()
        progressed = self._engine.progressed
        own = RunToEnd(self._engine.local_shards(), progressed)
        with all_or_none("reading the weights to generate with", own):
            packer = WeightPacker(own)
            sent, *received = self._buffers()
        pieces = RunToEnd(self._exchange(packer, sent, received), progressed)
        with all_or_none("gathering the weights to generate with", pieces):
            yield from self._wanted.assembled(pieces)

    def _buffers(self) -> list[Tensor]:
        """Returns memory for the bucket that is sent, and for one bucket of each rank."""
        size = min(self._bucket_bytes, max((b.nbytes for b in _buckets(self._plans)), default=0))
        rows = 1 + dist.get_world_size()
        return list(torch.empty((rows, -(-size // 16) * 16), dtype=torch.uint8, device=self._device))

    def _exchange(self, packer: WeightPacker, sent: Tensor, received: Sequence[Tensor]) -> Iterator[Piece]:
        """Yields all pieces of this rank's generation shards, valid until the next is asked for. Collective; allocates
        no memory for weights."""
        for plan in self._plans:
            for number in range(max(map(len, plan))):
                buckets = [buckets[number] for buckets in plan if number < len(buckets)]
                arrived = self._send_and_receive(buckets, packer, sent, received)
                for bucket in buckets:
                    if self._rank not in bucket.destinations:
                        continue
                    for piece in bucket.pieces:
                        is_own = bucket.source == self._rank
                        tensor = packer.find(piece.slice) if is_own else _place(arrived[bucket.source], piece)
                        yield piece.slice, Values(tensor)

    def _send_and_receive(
        self, buckets: Sequence[Bucket], packer: WeightPacker, sent: Tensor, received: Sequence[Tensor]
    ) -> Mapping[int, Tensor]:
        """Moves the buckets of one round, at most one of each source; returns those that have arrived here by source.
        Collective."""
        arrived: dict[int, Tensor] = {}
        operations: list[dist.P2POp] = []
        for bucket in buckets:
            if bucket.source == self._rank:
                others = [rank for rank in bucket.destinations if rank != self._rank]
                if others:
                    _pack(bucket, packer, sent)
                operations += [dist.P2POp(dist.isend, sent[: bucket.nbytes], rank) for rank in others]
            elif self._rank in bucket.destinations:
                place = arrived[bucket.source] = received[bucket.source][: bucket.nbytes]
                operations.append(dist.P2POp(dist.irecv, place, bucket.source))
                self.received_bytes += bucket.nbytes
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return arrived


def _held_by_ranks(own: Iterable[WeightSlice]) -> list[list[WeightSlice]]:
    """Returns the slices that each rank passes, in rank order, on every rank. Collective."""
    message = worker_pb2.DescribeWeightsResponse(slices=map(slice_to_proto, own))
    everywhere = map(
        worker_pb2.DescribeWeightsResponse.FromString, bytes_of_ranks(message.SerializeToString())
    )
    return [[slice_from_proto(each) for each in message.slices] for message in everywhere]


def _plans(
    held: Sequence[Sequence[WeightSlice]],
    wanted: Sequence[Sequence[WeightSlice]],
    bucket_bytes: int,
    together_bytes: int,
) -> Iterator[Plan]:
    """Yields a plan for the tensors of each of several sets, in the order of names: of a set no rank wants more than
    `together_bytes`, unless it is one tensor.

    Args:
        held, wanted: Slices of each rank, in rank order.
        bucket_bytes: Size of a bucket.
        together_bytes: Bytes of a set.
    """
    sources, receivers = [_by_name(slices) for slices in held], [_by_name(slices) for slices in wanted]
    names: list[str] = []
    most = 0
    for name in sorted(set().union(*receivers)):
        nbytes = max(sum(each.nbytes for each in slices.get(name, ())) for slices in receivers)
        if names and most + nbytes > together_bytes:
            yield _plan(sources, receivers, names, bucket_bytes)
            names, most = [], 0
        names.append(name)
        most += nbytes
    yield _plan(sources, receivers, names, bucket_bytes)


def _by_name(slices: Iterable[WeightSlice]) -> dict[str, list[WeightSlice]]:
    found: dict[str, list[WeightSlice]] = {}
    for each in slices:
        found.setdefault(each.name, []).append(each)
    return found


def _plan(
    held: Sequence[Mapping[str, Sequence[WeightSlice]]],
    wanted: Sequence[Mapping[str, Sequence[WeightSlice]]],
    names: Sequence[str],
    bucket_bytes: int,
) -> Plan:
    """Plans the tensors of the given names, of which `held` and `wanted` have each rank's slices by name."""
    sources, receivers = (
        tuple(
            RankWeights(_place_of(rank), tuple(each for name in names for each in slices.get(name, ())))
            for rank, slices in enumerate(ranks)
        )
        for ranks in (held, wanted)
    )
    return plan_weights(WeightTransfer("generation", 0, bucket_bytes, sources, receivers))


def _place_of(rank: int) -> Endpoint:
    """Returns an endpoint for the plan. Every rank has its own host there, so that it reads elements it holds from
    itself."""
    return Endpoint(f"rank {rank}", f"rank {rank}", 0, "", rank)


def _buckets(plans: Iterable[Plan]) -> Iterator[Bucket]:
    return (bucket for plan in plans for buckets in plan for bucket in buckets)


def _pack(bucket: Bucket, packer: WeightPacker, memory: Tensor) -> None:
    for piece in bucket.pieces:
        copy_values(_place(memory, piece), packer.find(piece.slice))


def _place(memory: Tensor, piece: BucketPiece) -> Tensor:
    """Returns the place of a slice in a bucket's memory, in its element type and shape."""
    part = memory[piece.start : piece.start + piece.slice.nbytes]
    return part.view(getattr(torch, piece.slice.dtype)).view(piece.slice.box.shape)
