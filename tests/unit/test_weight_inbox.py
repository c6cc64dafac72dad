"""Weights on their way into a rollout engine: served whole, of one version, or not at all, whatever fails."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.weight_plans import WeightSlice
from rlhf.errors import Refused, TransferError
from services.rollout.base import Generation, Meter, RolloutEngine, SamplingOptions, check_names
from services.rollout_service.inbox import WeightInbox
from services.storage.layout import Layout
from services.weights.copying import Values
from services.weights.versions import Version, Versions
from services.weights.wanted import Piece, WantedWeights

CPU = torch.device("cpu")
LAYOUTS = {
    "columns": Layout((6, 4), 0, parts=2, transposed=False),
    "embedding": Layout((5, 3), 0, parts=2, padding=1, tied=True),
    "norm": Layout((4,), 0),
    "rows": Layout((3, 8), 0, parts=2, transposed=True),
}
ALIASES = {"head": "embedding"}
KINDS = pytest.mark.parametrize(
    ("second_buffer", "in_memory"), [(True, True), (True, False), (False, True), (False, False)]
)


class KeptTensors(RolloutEngine):
    """An engine that generates nothing: it has the tensors that it was given."""

    def __init__(self, wanted: WantedWeights, in_memory: bool, keeps: bool = False) -> None:
        self.tensors, self._keeps = wanted.allocate(), keeps
        self._in_memory, self._names = in_memory, {*wanted.layouts, *wanted.aliases}

    @classmethod
    def create(cls, *args: Any, **more: Any) -> KeptTensors:
        raise NotImplementedError

    def weight_memory(self) -> Mapping[str, Tensor]:
        return dict(self.tensors) if self._in_memory else {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        came = set()
        for name, tensor in weights:
            came.add(name)
            if name in self.tensors and self._keeps:
                self.tensors[name] = tensor
            elif name in self.tensors:
                self.tensors[name].copy_(tensor)
        check_names(came, self._names)

    def versions(self) -> set[float]:
        return {float(x) for tensor in self.tensors.values() for x in tensor.unique() if x}

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingOptions, row_seeds: np.ndarray, meter: Meter
    ) -> Generation:
        raise NotImplementedError

    def _free_memory(self) -> int:
        return 0

    def _take_memory(self) -> int:
        return 0


def wants(part: int) -> WantedWeights:
    return WantedWeights(LAYOUTS, part, torch.float32, CPU, 1, ALIASES)


def pieces_of(wanted: WantedWeights, value: Any, seed: int = 0) -> Iterator[Piece]:
    """All slices, cut along their first axis and in random order; `value` returns the values of a piece."""
    cut = []
    for each in wanted.slices():
        middle = (each.box.starts[0] + each.box.stops[0]) // 2
        for start, stop in ((each.box.starts[0], middle), (middle, each.box.stops[0])):
            if stop > start:
                box = Slice((start, *each.box.starts[1:]), (stop, *each.box.stops[1:]))
                cut.append(WeightSlice(each.name, each.shape, box, each.dtype))
    random.Random(seed).shuffle(cut)
    for each in cut:
        yield each, Values(value(each))


def constant(number: float) -> Any:
    return lambda each: torch.full(each.box.shape, number)


@pytest.mark.parametrize("part", [0, 1])
@KINDS
def test_each_tensor_has_the_values_of_its_slices(part: int, second_buffer: bool, in_memory: bool) -> None:
    whole = {name: torch.randn(layout.shape) for name, layout in LAYOUTS.items()}

    def values(each: WeightSlice) -> Tensor:
        return whole[each.name][tuple(map(slice, each.box.starts, each.box.stops))]

    wanted = wants(part)
    engine = KeptTensors(wanted, in_memory)
    inbox = WeightInbox(engine, wanted, second_buffer=second_buffer)
    received = inbox.receive(Version("a", 1), pieces_of(wanted, values))
    inbox.commit()
    assert received == sum(each.nbytes for each in wanted.slices())
    for name, layout in LAYOUTS.items():
        shard = layout.shard(engine.tensors[name], part)
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True))
        assert torch.equal(shard.tensor, whole[name][box]), name
        assert engine.tensors[name].shape == layout.kept_shape
    assert engine.tensors["embedding"][-1].eq(0).all() == (part == 1)  # the row of padding


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("keeps", [False, True])
@KINDS
def test_a_rank_serves_one_whole_version_or_refuses(
    seed: int, second_buffer: bool, in_memory: bool, keeps: bool
) -> None:
    """Transfers that succeed, fail half-way or come twice, and commits of the right and of wrong ones, at random."""
    drawn = random.Random(seed)
    wanted = wants(0)
    engine = KeptTensors(wanted, in_memory, keeps)
    inbox = WeightInbox(engine, wanted, second_buffer=second_buffer)
    expected: Version | None = None  # what is served
    arrived: Version | None = None
    for number in range(1, 60):
        version = Version(f"transfer-{number}", number, f"state-{number}")
        match drawn.choice(["send", "send", "break", "commit", "commit a wrong one", "clear"]):
            case "send":
                inbox.receive(version, pieces_of(wanted, constant(number), number))
                expected, arrived = expected if second_buffer else None, version
            case "break":
                pieces, sent = pieces_of(wanted, constant(number), number), drawn.randrange(5)
                with pytest.raises(ConnectionError):
                    inbox.receive(version, broken(pieces, sent))
                if second_buffer:
                    arrived = None
                elif sent:
                    expected = arrived = None
            case "commit" if arrived or expected:
                inbox.versions.check_commit((arrived or expected).transfer)  # type: ignore[union-attr]
                inbox.commit()
                expected, arrived = arrived or expected, None
            case "commit a wrong one":
                with pytest.raises(Refused, match="cannot be committed"):
                    inbox.versions.check_commit("transfer-0")
            case "clear" if drawn.random() < 0.2:
                inbox.clear()
                expected = arrived = None
        assert inbox.versions.served == expected
        if expected is not None:
            assert engine.versions() == {float(expected.policy_version)}


def broken(pieces: Iterator[Piece], sent: int) -> Iterator[Piece]:
    for _ in range(sent):
        yield next(pieces)
    raise ConnectionError("the source has died")


@KINDS
def test_a_transfer_that_lacks_a_piece_is_no_version(second_buffer: bool, in_memory: bool) -> None:
    wanted = wants(0)
    inbox = WeightInbox(KeptTensors(wanted, in_memory), wanted, second_buffer=second_buffer)
    pieces = list(pieces_of(wanted, constant(1)))[1:]
    with pytest.raises((TransferError, ValueError), match=r"bytes of weights have arrived|did not come"):
        inbox.receive(Version("a", 1), pieces)
    with pytest.raises(Refused):
        inbox.versions.check_commit("a")


def test_weights_that_cannot_be_loaded_are_not_served() -> None:
    wanted = wants(0)
    engine = KeptTensors(wanted, in_memory=True)
    inbox = WeightInbox(engine, wanted, second_buffer=True)
    inbox.receive(Version("a", 1), pieces_of(wanted, constant(1)))
    inbox.commit()
    inbox.receive(Version("b", 2), pieces_of(wanted, constant(2)))
    engine._names = {"another"}
    with pytest.raises(ValueError, match="do not match"):
        inbox.commit()
    assert inbox.versions.served is None


@pytest.mark.parametrize("keeps", [False, True])
def test_the_second_buffer_is_allocated_once(keeps: bool) -> None:
    wanted = wants(0)
    engine = KeptTensors(wanted, in_memory=True, keeps=keeps)
    inbox = WeightInbox(engine, wanted, second_buffer=True)
    memory = {tensor.data_ptr() for tensor in engine.tensors.values()}
    for number in range(1, 5):
        inbox.receive(Version(f"{number}", number), pieces_of(wanted, constant(number)))
        memory |= {tensor.data_ptr() for tensor in inbox._buffer.values()}
        inbox.commit()
        assert engine.versions() == {float(number)}
    assert len(memory) == 2 * len(LAYOUTS)


def test_a_commit_that_comes_twice_does_nothing() -> None:
    versions = Versions(second_buffer=True)
    versions.complete(Version("a", 1))
    for _ in range(2):
        versions.check_commit("a")
        versions.commit()
    assert versions.served == Version("a", 1)


def test_a_commit_of_weights_that_are_served_is_none_of_those_that_have_arrived_since() -> None:
    versions = Versions(second_buffer=True)
    versions.complete(Version("a", 1))
    versions.commit()
    versions.begin()
    versions.complete(Version("b", 2))
    with pytest.raises(Refused, match=r"'a' cannot be committed: the weights of transfer 'b' await"):
        versions.check_commit("a")
    versions.check_commit("b")


def test_a_rank_that_has_the_weights_commits_a_transfer_without_bytes() -> None:
    wanted = wants(0)
    engine = KeptTensors(wanted, in_memory=True)
    inbox = WeightInbox(engine, wanted, second_buffer=False)
    inbox.receive(Version("a", 1, "state"), pieces_of(wanted, constant(1)))
    inbox.commit()
    inbox.keep(Version("b", 1, "state"))
    assert inbox.versions.served == Version("a", 1, "state")
    inbox.commit()
    assert inbox.versions.served == Version("b", 1, "state")
    assert engine.versions() == {1.0}


@KINDS
def test_a_source_that_is_gone_before_the_first_piece_costs_nothing(
    second_buffer: bool, in_memory: bool
) -> None:
    wanted = wants(0)
    inbox = WeightInbox(KeptTensors(wanted, in_memory), wanted, second_buffer=second_buffer)
    inbox.receive(Version("a", 1), pieces_of(wanted, constant(1)))
    inbox.commit()

    def gone() -> Iterator[Piece]:
        raise ConnectionError("nobody there")
        yield

    with pytest.raises(ConnectionError):
        inbox.receive(Version("b", 2), gone())
    assert inbox.versions.served == Version("a", 1)


def test_weights_that_a_later_transfer_has_replaced_are_not_committed() -> None:
    """They were in the second buffer, which the later transfer took, though not one piece of it came."""
    wanted = wants(0)
    inbox = WeightInbox(KeptTensors(wanted, in_memory=True), wanted, second_buffer=True)
    inbox.receive(Version("a", 1), pieces_of(wanted, constant(1)))
    with pytest.raises(ConnectionError):
        inbox.receive(Version("b", 2), broken(pieces_of(wanted, constant(2)), sent=0))
    with pytest.raises(Refused, match="no complete weights await"):
        inbox.versions.check_commit("a")


@pytest.mark.parametrize("keeps", [False, True])
def test_what_happens_while_weights_arrive_leaves_both_versions_whole(keeps: bool) -> None:
    """Another thread commits again, and frees the buffer, as Offload does, between two pieces."""
    wanted = wants(0)
    engine = KeptTensors(wanted, in_memory=True, keeps=keeps)
    inbox = WeightInbox(engine, wanted, second_buffer=True)
    inbox.receive(Version("a", 1), pieces_of(wanted, constant(1)))
    inbox.commit()

    def interrupted() -> Iterator[Piece]:
        for piece in pieces_of(wanted, constant(2)):
            with pytest.raises(Refused, match="no complete weights await"):
                inbox.versions.check_commit("b")
            inbox.versions.check_commit("a")
            inbox.commit()
            inbox.free_buffer()
            assert inbox.versions.served == Version("a", 1)
            assert engine.versions() == {1.0}
            yield piece

    inbox.receive(Version("b", 2), interrupted())
    inbox.free_buffer()
    inbox.commit()
    assert inbox.versions.served == Version("b", 2)
    assert engine.versions() == {2.0}


def test_a_transfer_begins_only_when_a_commit_is_through() -> None:
    wanted = wants(0)
    engine = KeptTensors(wanted, in_memory=True)
    inbox = WeightInbox(engine, wanted, second_buffer=True)
    inbox.receive(Version("a", 1), pieces_of(wanted, constant(1)))
    arriving = threading.Thread(target=lambda: inbox.receive(Version("b", 2), pieces_of(wanted, constant(2))))
    with inbox.lock:
        inbox.versions.check_commit("a")
        arriving.start()
        arriving.join(0.2)
        inbox.commit()
    arriving.join(20)
    assert (inbox.versions.served, inbox.versions.arrived) == (Version("a", 1), Version("b", 2))
    assert engine.versions() == {1.0}
