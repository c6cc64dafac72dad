"""Worker methods that describe and send the weights of a training engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nccl_transfer.bucket_board import BucketBoard
from nccl_transfer.bucket_offer import Offer
from nccl_transfer.refs.weight_plans import Bucket, WeightTransfer, plan_weights
from nccl_transfer.refs.wire_weights import slice_to_proto, transfer_from_proto
from nccl_transfer.store.store import Lease
from rlhf.errors import InvalidRequest, Refused, TransferError
from rlhf.v1 import weights_pb2
from services.engines.base import TrainEngine
from services.runtime.huge_pages import blocks_of, move_to_huge_pages
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register, require
from services.weights.packing import WeightPacker, slice_of


class SendingWorker(Worker):
    """Worker of a role with a training engine, which implements DescribeWeights and SendWeights.

    Attributes:
        engine: Training engine.
    """

    engine: TrainEngine
    _held_slices: list[weights_pb2.WeightSlice] | None = None
    """Slices that the engine holds, which stay the same; None until they are asked for."""

    @register("ONE_TO_ALL")
    def describe_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        with self.ranks.together(call.peers_deadline):
            self.engine.check_onloaded()
        if self._held_slices is None:
            slices, blocks = [], []
            for name, shard in self.engine.weight_shards():
                slices.append(slice_to_proto(slice_of(name, shard)))
                blocks.append(blocks_of(shard.tensor))
            move_to_huge_pages(blocks)
            self._held_slices = slices
        return CallResult(fields={"slices": self._held_slices})

    @register("ONE_TO_ALL")
    def send_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        require(request, "transfer")
        with self.buckets.reporting_failures(request.transfer.id):
            with self.ranks.together(call.peers_deadline):
                self.engine.check_onloaded()
                transfer = transfer_from_proto(request.transfer)
                buckets = self._own_buckets(transfer)
            packer = WeightPacker(self.engine.weight_shards())
            # A rank that fails alone waits for the others, which send until the controller cancels their calls.
            with self.ranks.together(call.peers_deadline):
                packer.check(transfer.sources[self.ranks.rank].slices)
                send(transfer, buckets, packer, self.buckets, call)
        packed = sum(bucket.nbytes for bucket in buckets)
        return CallResult(fields={"packed_bytes": packed, "buckets": len(buckets)})

    def _own_buckets(self, transfer: WeightTransfer) -> Sequence[Bucket]:
        """Returns the buckets that this rank packs.

        Raises:
            InvalidRequest: The sources are not the ranks of this service, or the transfer cannot be planned.
            Refused: It is of another policy version.
        """
        ranks, name = self.ranks, f"transfer {transfer.id}"
        if len(transfer.sources) != ranks.size:
            raise InvalidRequest(
                f"{name}: it has {len(transfer.sources)} sources; this service has {ranks.size} ranks"
            )
        if transfer.policy_version != self.policy_version:
            raise Refused(
                f"{name}: it is of policy version {transfer.policy_version}, but the weights have {self.policy_version}"
            )
        try:
            return plan_weights(transfer)[ranks.rank]
        except TransferError as error:
            raise InvalidRequest(f"{name}: {error}") from error


def send(
    transfer: WeightTransfer,
    buckets: Sequence[Bucket],
    packer: WeightPacker,
    board: BucketBoard,
    call: CallContext,
) -> None:
    """Offers the buckets of one source to their receivers, in place where all of these are on its host and can read
    there, else packed; blocks until all have read them.

    Raises:
        DeadlineExceeded: The call's deadline has passed; the message names the receivers that are late.
        CallCancelled: The call was cancelled.
        RlhfError: A bucket could not be packed.
    """

    def name_of(receiver: int) -> str:
        return str(transfer.receivers[receiver].endpoint)

    def is_near(bucket: Bucket) -> bool:
        hosts = {transfer.receivers[each].endpoint.host_id for each in bucket.destinations}
        return hosts == {transfer.sources[bucket.source].endpoint.host_id}

    lease = Lease(call.call.session, call.call.step)
    offer = Offer(
        transfer.id, board.store, lease, buckets, packer.pack, name_of, call.check_cancelled, call.deadline
    )
    call.progress(0, len(buckets))
    with board.opened(offer):
        for bucket in buckets:
            call.check()
            placed = None
            if is_near(bucket) and offer.may_be_in_place(bucket.number):
                placed = packer.place(bucket, board.store.checksums)
            if placed is not None:
                offer.place(bucket.number, placed)
            else:
                offer.pack(bucket.number)
            call.progress(bucket.number + 1, len(buckets))
        offer.wait_until_read()
