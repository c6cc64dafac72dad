"""What a source does with requests for its staging memory, in whatever order they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from contract.host_devices import HostCuda
from nccl_transfer.batch import Endpoint
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports.staging import StagingSource
from rlhf.errors import Refused
from rlhf.v1 import transfer_pb2 as pb


def stage_all(*requests: tuple[int, int]) -> Sequence[int]:
    """The generations that a source answers with to requests for (slot, generation), one after the other."""

    async def ask() -> list[int]:
        store, cuda = TensorStore(1 << 16), HostCuda("GPU")
        store.endpoint = Endpoint("here", epoch=1)
        shard = store.put(np.arange(8), Lease("session", 1))
        source = StagingSource(store, cuda, slot_bytes=64)
        opening = source.open_staging(
            pb.OpenStagingRequest(reader="reader", epoch=1, device_uuid=cuda.uuid)
        ).__aiter__()
        await anext(opening)
        ranges = [pb.ByteRange(shard=shard.id, start=0, nbytes=64)]
        try:
            return [
                (
                    await source.stage(
                        pb.StageRequest(
                            reader="reader", epoch=1, slot=slot, generation=generation, ranges=ranges
                        )
                    )
                ).generation
                for slot, generation in requests
            ]
        finally:
            source.close()
            await anext(opening, None)
            store.close()

    return asyncio.run(ask())


def test_requests_for_different_slots_may_overtake_each_other():
    assert stage_all((1, 2), (0, 1), (1, 4), (0, 3)) == [2, 1, 4, 3]


@pytest.mark.parametrize("late", [1, 3])
def test_a_slot_is_not_filled_for_a_request_that_is_not_newer(late):
    with pytest.raises(Refused, match=f"slot 0: generation {late} is not newer than 3"):
        stage_all((0, 3), (1, 2), (0, late))
