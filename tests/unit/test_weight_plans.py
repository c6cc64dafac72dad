"""Plans of weight transfers, against brute force over every element."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_transfer.refs.dtypes import ITEM_BYTES
from nccl_transfer.refs.plans import Slice
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.refs.weight_plans import (
    LEAST_BUCKET_BYTES,
    RankWeights,
    WeightSlice,
    WeightTransfer,
    buckets_of,
    plan_weights,
)
from nccl_transfer.refs.wire_weights import transfer_from_proto, transfer_to_proto
from rlhf.errors import InvalidRequest, TransferError

SHAPES = {"scalar": (), "bias": (7,), "matrix": (96, 40), "wide": (2, 3000), "cube": (3, 5, 4)}


def rank(service, number, slices, host="here"):
    port = {"actor": 1000, "rollout": 2000}[service] + number
    return RankWeights(Endpoint(f"127.0.0.1:{port}", host, 1, service, number), tuple(slices))


def whole(name, dtype="float32", shape=None):
    shape = SHAPES[name] if shape is None else shape
    return WeightSlice(name, shape, Slice.whole(shape), dtype)


def transfer(sources, receivers, bucket_bytes=LEAST_BUCKET_BYTES):
    return WeightTransfer("t", 3, bucket_bytes, tuple(sources), tuple(receivers))


@st.composite
def box(draw, shape):
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Slice(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


@st.composite
def transfers(draw):
    hosts = st.sampled_from(["here", "there"])

    def held(name):
        return WeightSlice(name, SHAPES[name], draw(box(SHAPES[name])), "float32")

    sources = [
        rank(
            "actor",
            number,
            [held(name) for name in SHAPES for _ in range(draw(st.integers(0, 2)))],
            draw(hosts),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    # The last source has what the others may lack.
    sources.append(rank("actor", len(sources), [whole(name) for name in SHAPES], draw(hosts)))
    receivers = []
    for number in range(draw(st.integers(1, 4))):
        wanted = []
        for name in draw(st.lists(st.sampled_from(sorted(SHAPES)), unique=True)):
            dtype = draw(st.sampled_from(["float32", "bfloat16"]))
            wanted.append(WeightSlice(name, SHAPES[name], draw(box(SHAPES[name])), dtype))
        receivers.append(rank("rollout", number, wanted, draw(hosts)))
    return transfer(sources, receivers, draw(st.sampled_from([LEAST_BUCKET_BYTES, 5001, 1 << 20])))


def cells(slice_):
    """Marks a slice in an array of the whole tensor's shape."""
    marks = np.zeros(slice_.shape, np.int64)
    marks[slice_.box.within(Slice.whole(slice_.shape))] = 1
    return marks


def every_receiver_gets_each_wanted_element_once_and_no_other(moved, plan):
    for number, receiver in enumerate(moved.receivers):
        arrived = {name: np.zeros(shape, np.int64) for name, shape in SHAPES.items()}
        for bucket in buckets_of(plan, number):
            for piece in bucket.pieces:
                arrived[piece.slice.name] += cells(piece.slice)
        for name, shape in SHAPES.items():
            wanted = [each for each in receiver.slices if each.name == name]
            np.testing.assert_array_equal(arrived[name], sum(map(cells, wanted), np.zeros(shape, np.int64)))
        assert sum(bucket.nbytes for bucket in buckets_of(plan, number)) == sum(
            each.nbytes for each in receiver.slices
        )


def buckets_are_numbered_within_bounds_and_held_by_their_source(moved, plan):
    for number, buckets in enumerate(plan):
        held = moved.sources[number].slices
        assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
        for bucket in buckets:
            assert bucket.source == number
            assert bucket.destinations == tuple(sorted(set(bucket.destinations)))
            assert 0 < bucket.nbytes <= moved.bucket_bytes
            assert len({piece.slice.dtype for piece in bucket.pieces}) == 1
            end = 0
            for piece in bucket.pieces:
                assert piece.start == end
                assert piece.start % ITEM_BYTES[piece.slice.dtype] == 0
                end += piece.slice.nbytes
                assert any(
                    each.name == piece.slice.name and each.box.intersect(piece.slice.box) == piece.slice.box
                    for each in held
                )
            assert end == bucket.nbytes


def both_sides_plan_the_same_from_the_message(moved, plan):
    message = transfer_to_proto(moved).SerializeToString()
    here, there = (transfer_from_proto(type(transfer_to_proto(moved)).FromString(message)) for _ in range(2))
    assert here == moved
    assert plan_weights(here) == plan_weights(there) == plan


def an_element_crosses_hosts_only_if_its_host_lacks_it(moved, plan):
    for number, receiver in enumerate(moved.receivers):
        for bucket in buckets_of(plan, number):
            source = moved.sources[bucket.source].endpoint
            if source.host_id == receiver.endpoint.host_id:
                continue
            for piece in bucket.pieces:
                for near in moved.sources:
                    if near.endpoint.host_id == receiver.endpoint.host_id:
                        theirs = [each for each in near.slices if each.name == piece.slice.name]
                        assert all(each.box.intersect(piece.slice.box) is None for each in theirs)


def no_receiver_waits_for_ever_if_sources_are_two_buckets_ahead_at_most(moved, plan, random):
    to_read = {number: buckets_of(plan, number) for number in range(len(moved.receivers))}
    unread = {(b.source, b.number): set(b.destinations) for source in plan for b in source}
    while any(to_read.values()):
        packed = {
            (source, number)
            for source, buckets in enumerate(plan)
            for number in range(len(buckets))
            if not any(unread[source, before] for before in range(max(0, number - 1)))
        }
        ready = [n for n, left in to_read.items() if left and (left[0].source, left[0].number) in packed]
        assert ready, "every receiver waits"
        number = random.choice(ready)
        bucket = to_read[number].pop(0)
        unread[bucket.source, bucket.number].remove(number)


@pytest.mark.parametrize("examples", [25, pytest.param(3000, marks=pytest.mark.full)])
def test_random_transfers_are_planned_as_brute_force_says(examples):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(transfers(), st.randoms(use_true_random=False))
    def check(moved, random):
        plan = plan_weights(moved)
        every_receiver_gets_each_wanted_element_once_and_no_other(moved, plan)
        buckets_are_numbered_within_bounds_and_held_by_their_source(moved, plan)
        both_sides_plan_the_same_from_the_message(moved, plan)
        an_element_crosses_hosts_only_if_its_host_lacks_it(moved, plan)
        no_receiver_waits_for_ever_if_sources_are_two_buckets_ahead_at_most(moved, plan, random)

    check()


def test_replicas_that_want_the_same_read_the_same_buckets():
    moved = transfer(
        [rank("actor", number, [whole("matrix"), whole("wide")]) for number in range(2)],
        [rank("rollout", number, [whole("matrix"), whole("wide")]) for number in range(3)],
    )
    plan = plan_weights(moved)
    assert {bucket.destinations for source in plan for bucket in source} == {(0, 1, 2)}
    assert sum(bucket.nbytes for source in plan for bucket in source) == 4 * (96 * 40 + 6000)


def test_sources_with_replicas_share_the_packing():
    names = [f"layer.{number}" for number in range(20)]
    held = [whole(name, shape=(64, 16)) for name in names]
    moved = transfer([rank("actor", 0, held), rank("actor", 1, held)], [rank("rollout", 0, held)])
    first, second = (sum(bucket.nbytes for bucket in source) for source in plan_weights(moved))
    assert first == second


@pytest.mark.parametrize(
    ("sources", "receivers", "message"),
    [
        (["bias"], [whole("matrix")], "no rank holds matrix, which rollout rank 0"),
        (["bias"], [whole("bias", shape=(8,))], r"bias has shape \(7,\), but rollout rank 0 .* with \(8,\)"),
        (["bias"], [whole("bias", "int32")], "bias is float32, but rollout rank 0 .* as int32"),
    ],
)
def test_what_the_sources_do_not_have_is_an_error_that_names_it(sources, receivers, message):
    moved = transfer([rank("actor", 0, map(whole, sources))], [rank("rollout", 0, receivers)])
    with pytest.raises(TransferError, match=message):
        plan_weights(moved)


def test_a_part_that_no_source_holds_is_named():
    half = WeightSlice("bias", (7,), Slice((0,), (4,)), "float32")
    moved = transfer([rank("actor", 0, [half])], [rank("rollout", 0, [whole("bias")])])
    with pytest.raises(TransferError, match=r"bias: no rank holds \[4\] to \[7\], which rollout rank 0"):
        plan_weights(moved)


def test_a_plan_without_end_is_refused():
    huge = whole("huge", shape=(1 << 40,))
    moved = transfer([rank("actor", 0, [huge])], [rank("rollout", 0, [huge])])
    with pytest.raises(TransferError, match="more than 65536 buckets: raise bucket_bytes"):
        plan_weights(moved)
    with pytest.raises(TransferError, match="bucket_bytes is 7; at least 4096"):
        plan_weights(transfer([rank("actor", 0, [])], [], bucket_bytes=7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": ""}, "transfer.id has 0 characters"),
        ({"sources": []}, "it has no sources"),
    ],
)
def test_an_incomplete_message_is_refused(change, message):
    good = transfer_to_proto(transfer([rank("actor", 0, [whole("bias")])], []))
    for field, value in change.items():
        good.ClearField(field)
        if value:
            setattr(good, field, value)
    with pytest.raises(InvalidRequest, match=message):
        transfer_from_proto(good)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "a name has 1 to"),
        ({"starts": [8]}, "starts and stops need 1 numbers|is not within shape"),
        ({"stops": [8]}, r"\[0\] to \[8\] is not within shape \[7\]"),
        ({"starts": [0, 0]}, "starts and stops need 1 numbers"),
        ({"shape": [1 << 45]}, "has more than 8 axes or"),
        ({"dtype": 0}, "dtype 0 is not a numeric element type"),
    ],
)
def test_an_invalid_slice_is_refused_by_name(change, message):
    encoded = transfer_to_proto(transfer([rank("actor", 0, [whole("bias")])], []))
    slice_ = encoded.sources[0].slices[0]
    for field, value in change.items():
        slice_.ClearField(field)
        if isinstance(value, list):
            getattr(slice_, field).extend(value)
        else:
            setattr(slice_, field, value)
    with pytest.raises(InvalidRequest, match=message):
        transfer_from_proto(encoded)
