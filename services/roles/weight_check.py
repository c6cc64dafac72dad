"""Finds weights that have changed by themselves: compares checksums of the tensors in memory over time, and of replicas
over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from rlhf.errors import CorruptWeights
from services.engines.agreement import RunToEnd, all_or_none
from services.engines.base import HeldTensor
from services.engines.collectives import rows_of_ranks, texts_of_ranks
from services.runtime.ranks import known_to_all

SHOWN = 2
"""Most tensors that a rank names in an error; it counts the others."""

Key = tuple[str, str]
"""Name and place of a `HeldTensor`."""


@dataclass(frozen=True)
class Checksums:
    """Checksums (xxh3, 64 bits) of this rank's tensors.

    Attributes:
        of: Checksum of each tensor by key, as a signed integer.
        learning: Keys of the tensors that optimizer steps change.
        nbytes: Bytes of all tensors.
    """

    of: Mapping[Key, int]
    learning: frozenset[Key]
    nbytes: int


def checksums_of(held: Iterable[HeldTensor], progressed: Callable[[], None] = lambda: None) -> Checksums:
    """Reads tensors and returns their checksums. Collective over the default process group, as `held` may be.

    Args:
        held: The tensors.
        progressed: Called after each tensor.

    Raises:
        PeerRankFailed: Another rank could not read its tensors.
    """
    collective, of, learning, nbytes = RunToEnd(held, progressed), {}, set(), 0
    with all_or_none("reading the weights", collective):
        for each in collective:
            key = each.name, each.place
            of[key], nbytes = _checksum(each.tensor), nbytes + each.tensor.nbytes
            if each.learns:
                learning.add(key)
    return Checksums(of, frozenset(learning), nbytes)


class WeightCheck:
    """Compares the tensors in the memory of all ranks of a service with each other, and with what they were.

    Args:
        progressed: Called after each tensor that is read. Default: does nothing.

    Attributes:
        is_armed: Whether the checksums of tensors that learn are known, so that the next update should compare them;
            the same on all ranks.
    """

    def __init__(self, progressed: Callable[[], None] = lambda: None) -> None:
        self._progressed = progressed
        self._known: Checksums | None = None
        self.is_armed = False
        self._has_first_values = True

    def verify(self, held: Iterable[HeldTensor]) -> int:
        """Compares tensors with their checksums of the last `verify`, as far as they may not have changed since, and
        replicas with each other; keeps the checksums and returns the bytes that were read. Collective.

        Args:
            held: All tensors of this rank that only optimizer steps and loads change.

        Raises:
            CorruptWeights: Tensors differ; raised on every rank, with the names and ranks that all ranks have found.
        """
        now = checksums_of(held, self._progressed)
        self.raise_together([*self._changed(now), *self._unequal(now)])
        self._known, self.is_armed = now, True
        return now.nbytes

    def verify_before_update(self, held: Iterable[HeldTensor]) -> None:
        """Compares tensors with their checksums of the last `verify`, and forgets those of tensors that learn, which
        are about to change. Only if `is_armed`. Collective.

        Args:
            held: The tensors, as for `verify`.

        Raises:
            CorruptWeights: As for `verify`.
        """
        self.raise_together(self._changed(checksums_of(held, self._progressed)))
        self._forget_learning()

    def before_load(self) -> None:
        """Forgets all checksums, since all tensors are about to be loaded. Not collective."""
        self._known, self.is_armed, self._has_first_values = None, False, False

    def before_start_over(self) -> None:
        """Forgets the checksums of the tensors that are about to get their first values: of those that learn, and of
        all after a load. Not collective."""
        if not self._has_first_values:
            self.before_load()
        self._forget_learning()
        self._has_first_values = True

    def _forget_learning(self) -> None:
        self.is_armed = False
        if self._known is not None:
            frozen = {key: x for key, x in self._known.of.items() if key not in self._known.learning}
            self._known = Checksums(frozen, frozenset(), self._known.nbytes)

    def raise_together(self, found: Iterable[str]) -> None:
        """Raises CorruptWeights on every rank if any rank reports a corrupt tensor. The message has the reports of all
        ranks. Collective.

        Args:
            found: Reports of this rank, one text for each corrupt tensor.
        """
        texts = list(found)
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        own = "; ".join(texts[:SHOWN]) + more
        everywhere = [text for text in texts_of_ranks(own) if text]
        if everywhere:
            raise known_to_all(CorruptWeights(f"weights in memory are corrupt: {'; '.join(everywhere)}"))

    def _changed(self, now: Checksums) -> list[str]:
        known = self._known.of if self._known is not None else {}
        return [
            f"{key[0]} on rank {dist.get_rank()} has changed since it was last verified"
            for key, checksum in now.of.items()
            if known.get(key, checksum) != checksum
        ]

    def _unequal(self, now: Checksums) -> list[str]:
        """Returns the tensors that differ between replicas. The lowest rank with a replica reports each. Collective."""
        keys = {_signed(f"{name} {place}".encode()): (name, place) for name, place in now.of}
        table = torch.tensor([[short, now.of[key]] for short, key in keys.items()], dtype=torch.int64)
        ranks_by_checksum: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, rows in enumerate(rows_of_ranks(table.reshape(-1, 2))):
            for short, checksum in rows.tolist():
                ranks_by_checksum[short][checksum].append(rank)
        found = []
        for short, (name, _) in keys.items():
            replicas = list(ranks_by_checksum[short].values())
            if len(replicas) > 1 and dist.get_rank() == min(map(min, replicas)):
                found.append(f"{name} {_odd_ones(replicas)}")
        return found


def _odd_ones(replicas: list[list[int]]) -> str:
    """Returns a text that names the ranks whose replicas differ from the majority, or all ranks if there is none.

    Args:
        replicas: Ranks with equal replicas, for each value of the replica.
    """
    most, everyone = max(replicas, key=len), sorted(rank for ranks in replicas for rank in ranks)
    if 2 * len(most) <= len(everyone):
        return f"differs between ranks {', '.join(map(str, everyone))}"
    odd = sorted(set(everyone) - set(most))
    return f"on rank {', '.join(map(str, odd))} differs from that of ranks {', '.join(map(str, most))}"


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return _signed(flat.cpu().numpy().data)


def _signed(data: bytes | memoryview) -> int:
    """Returns the checksum of bytes as a signed 64-bit integer, as torch has no collectives of unsigned
    ones."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)
