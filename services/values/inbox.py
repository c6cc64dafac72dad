"""Receives the weights of a transfer into a second buffer of a training engine that only runs inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nccl_transfer.refs.weight_plans import WeightSlice
from services.engines.agreement import takes_effect
from services.engines.base import Snapshot
from services.engines.sharded import ShardedEngine, snapshot_weights
from services.roles.receiving_worker import Inbox
from services.weights.packing import WeightPacker, slice_of
from services.weights.receive import Piece
from services.weights.versions import Version


class EngineInbox(Inbox):
    """Receives the weights of transfers into a training engine: writes them to a snapshot, which a commit restores.

    Args:
        engine: Engine of this rank.
    """

    def __init__(self, engine: ShardedEngine) -> None:
        super().__init__(second_buffer=True)
        self._engine = engine
        self._arriving: Snapshot | None = engine.snapshot()
        weights = snapshot_weights(engine, self._arriving)
        self._wanted = [slice_of(name, shard) for name, shard in weights]

    def slices(self) -> Sequence[WeightSlice]:
        return self._wanted

    def receive(self, version: Version, pieces: Iterable[Piece]) -> int:
        self.versions.begin()
        self._arriving = self._arriving or self._engine.snapshot()
        places, received = WeightPacker(snapshot_weights(self._engine, self._arriving)), 0
        for piece, values in pieces:
            values.copy_to(places.find(piece))
            received += piece.nbytes
        return self._complete(version, received, in_buffer=True)

    def free_buffer(self) -> None:
        if not (self.versions.arrived and self._is_in_buffer):
            self._arriving = None

    def _load_buffer(self) -> None:
        assert self._arriving is not None
        with takes_effect("taking the weights of a transfer"):
            self._engine.restore(self._arriving)
