"""Receives the weights of a transfer into a rollout engine: into a second buffer, or in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from nccl_transfer.refs.weight_plans import WeightSlice
from services.roles.receiving_worker import Inbox
from services.rollout.base import RolloutEngine
from services.weights.receive import Piece
from services.weights.versions import Version
from services.weights.wanted import WantedWeights


class WeightInbox(Inbox):
    """Receives the weights of transfers into a rollout engine.

    Args:
        engine: Rollout engine of this rank.
        wanted: The weights that it generates with.
        second_buffer: Whether weights are received into a second buffer. If not, they are written to the engine's own
            memory (`RolloutEngine.weight_memory`), or loaded tensor by tensor if the engine exposes no memory.

    With a second buffer, one thread may call `receive` and `keep` while the engine generates and another thread calls
    the other methods.
    """

    def __init__(self, engine: RolloutEngine, wanted: WantedWeights, *, second_buffer: bool) -> None:
        super().__init__(second_buffer=second_buffer)
        self._engine, self.wanted = engine, wanted
        self._second_buffer = second_buffer
        self._buffer: dict[str, Tensor] = {}
        self._is_arriving = False

    def slices(self) -> Sequence[WeightSlice]:
        return self.wanted.slices()

    def receive(self, version: Version, pieces: Iterable[Piece]) -> int:
        counted = _CountedPieces(pieces, self._note_first)
        try:
            if self._second_buffer:
                self.wanted.write(self._emptied_buffer(), counted)
            else:
                self._receive_in_place(counted)
            return self._complete(version, counted.nbytes, in_buffer=self._second_buffer)
        finally:
            self._is_arriving = False

    def free_buffer(self) -> None:
        with self.lock:
            if not (self._is_arriving or (self.versions.arrived and self._is_in_buffer)):
                self._buffer = {}

    def _load_buffer(self) -> None:
        before, buffer, self._buffer = self._engine.weight_memory(), self._buffer, {}
        self._engine.load_weights(self.wanted.named(buffer))
        self._buffer = _spare(buffer, before, self._engine.weight_memory())

    def _emptied_buffer(self) -> dict[str, Tensor]:
        """Returns the second buffer for a new transfer. Discards the weights that an earlier transfer wrote to it."""
        with self.lock:
            self._is_arriving = True
            self.versions.begin()
            self._buffer = self._buffer or self.wanted.allocate()
            return self._buffer

    def _note_first(self) -> None:
        """Notes that the first piece of a transfer has arrived."""
        if not self._second_buffer:
            self.versions.begin()

    def _receive_in_place(self, pieces: Iterable[Piece]) -> None:
        memory = self._engine.weight_memory()
        if memory:
            self.wanted.write(memory, pieces)
        else:
            self._engine.load_weights(self.wanted.assembled(pieces))


def _spare(
    buffer: Mapping[str, Tensor], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors that the next transfer reuses as its buffer, since the first write to newly allocated memory
    causes page faults. A tensor of the buffer that the engine adopted is replaced by the engine's previous tensor.
    Returns an empty dictionary if the engine does not expose its weights.

    Args:
        buffer: The tensors that were loaded into the engine.
        before, after: `RolloutEngine.weight_memory` before and after the load.
    """
    spare = {}
    for name, tensor in buffer.items():
        if name not in after:
            return {}
        is_kept = after[name].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        spare[name] = before[name] if is_kept else tensor
    return spare


class _CountedPieces:
    """Iterable over the pieces of a transfer that counts their bytes.

    Args:
        pieces: The pieces.
        begin: Called before the first piece is yielded.

    Attributes:
        nbytes: Total size in bytes of the pieces yielded so far.
    """

    def __init__(self, pieces: Iterable[Piece], begin: Callable[[], None]) -> None:
        self._pieces, self._begin, self.nbytes = pieces, begin, 0

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            if not self.nbytes:
                self._begin()
            self.nbytes += piece[0].nbytes
            yield piece
