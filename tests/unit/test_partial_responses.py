"""Responses that several calls generate: the tokens of a single call, and the version and log-probability of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, pretending
from unit.one_rank import NEW_TOKENS, OneRank

from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.generation.partial import extended

pytestmark = pytest.mark.usefixtures("process_group")

GREEDY = actor_pb2.Sampling(max_new_tokens=NEW_TOKENS, greedy=True)
SAMPLED = actor_pb2.Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0)
PARTIAL = {
    "partial_ids": "response_ids",
    "partial_log_probs": "rollout_log_probs",
    "partial_versions": "response_versions",
}


@pytest.fixture
def rank(tiny_llama_dir: Path) -> Iterator[OneRank]:
    rank = OneRank(tiny_llama_dir)
    yield rank
    rank.close()


def go_on(rank: OneRank, sampling: actor_pb2.Sampling, tokens: int) -> dict[str, float]:
    """Adds a segment of `tokens` tokens to the responses; 0: all that are left."""
    rank.columns |= {name: rank.columns[made] for name, made in PARTIAL.items()}
    request = actor_pb2.GenerateSequencesRequest(sampling=sampling, segment_tokens=tokens, return_ends=True)
    return rank.call(rank.actor, "generate_sequences", request, "prompt", *PARTIAL)


def texts(rank: OneRank, name: str) -> list[str]:
    column = rank.columns[name]
    assert isinstance(column, LocalColumn)
    return column.texts


def begin(rank: OneRank, sampling: actor_pb2.Sampling, tokens: int) -> None:
    request = actor_pb2.GenerateSequencesRequest(sampling=sampling, segment_tokens=tokens, return_ends=True)
    rank.call(rank.actor, "generate_sequences", request, "prompt")


@pytest.mark.parametrize("tokens", [1, 2, 4, NEW_TOKENS])
@pytest.mark.parametrize("stops", [False, True], ids=["", "a stop token"])
def test_segments_add_up_to_the_response_of_one_call(rank: OneRank, tokens: int, stops: bool) -> None:
    request = actor_pb2.GenerateSequencesRequest(sampling=GREEDY, return_ends=True)
    metrics = rank.call(rank.actor, "generate_sequences", request, "prompt")
    if stops:
        longest = max(rank.read("response_ids").tolist(), key=len)
        request.sampling.stop_token_ids.append(int(longest[2]))
        assert (metrics := rank.call(rank.actor, "generate_sequences", request, "prompt"))["finished"] > 0
    ids, log_probs = rank.read("response_ids"), rank.read("rollout_log_probs")
    ends = texts(rank, "turn_end")
    del rank.columns["turn_end"]
    begin(rank, request.sampling, tokens)
    assert max(rank.read("response_ids").lengths) == min(tokens, max(ids.lengths))
    for _ in range(tokens, NEW_TOKENS, tokens):
        assert go_on(rank, request.sampling, tokens) == {}
    assert "turn_end" not in rank.columns
    assert go_on(rank, request.sampling, 0) == metrics
    assert texts(rank, "turn_end") == ends
    assert rank.read("response_ids").tolist() == ids.tolist()
    segmented = rank.read("rollout_log_probs")
    np.testing.assert_allclose(segmented.values, log_probs.values, atol=1e-5)
    assert rank.read("response_versions").tolist() == [[0] * len(row) for row in ids.tolist()]


def test_each_token_has_the_version_and_the_log_probability_of_the_weights_that_generated_it(
    rank: OneRank,
) -> None:
    begin(rank, SAMPLED, 2)
    first = {name: rank.read(name) for name in ("response_ids", "rollout_log_probs")}
    rank.actor.policy_version += 1
    go_on(rank, SAMPLED, 1)
    rank.actor.policy_version += 1
    go_on(rank, SAMPLED, 0)
    ids, versions = rank.read("response_ids"), rank.read("response_versions").tolist()
    expected = [0, 0, 1, *[2] * (NEW_TOKENS - 3)]
    assert versions == [expected[:length] for length in ids.lengths]
    assert max(ids.lengths) > 3
    for name, column in first.items():
        whole = rank.read(name).tolist()
        assert [
            row[: len(begun)] for row, begun in zip(whole, column.tolist(), strict=True)
        ] == column.tolist()
    # The weights have not changed, so the training engine gives the log-probabilities of every segment.
    rank.log_probs()
    np.testing.assert_allclose(
        rank.read("log_probs").values, rank.read("rollout_log_probs").values, atol=1e-4
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partial_versions": None}, "partial_versions"),
        (
            {"partial_log_probs": Jagged(np.zeros(3, np.float32), np.array([1, 1, 1, 0, 0, 0]))},
            "different lengths",
        ),
        ({"partial_ids": [[7] * 7, [7], [7], [7], [7], [7]]}, "max_new_tokens, 6, tokens"),
        ({"partial_ids": [[7, 7], [7], [7], [7], [7], [7]]}, "different numbers of tokens"),
    ],
)
def test_responses_that_cannot_go_on_are_refused(rank: OneRank, change: dict[str, Any], said: str) -> None:
    begin(rank, SAMPLED, 1)
    for name, value in change.items():
        if isinstance(value, list):
            lengths = np.array([len(row) for row in value])
            total = int(lengths.sum())
            rank.columns["response_ids"] = LocalColumn(
                Jagged(np.concatenate(value).astype(np.int32), lengths)
            )
            zeros = np.zeros(total, np.float32)
            rank.columns["rollout_log_probs"] = LocalColumn(Jagged(zeros, lengths))
            rank.columns["response_versions"] = LocalColumn(Jagged(zeros.astype(np.int64), lengths))
        elif value is not None:
            rank.columns[PARTIAL[name]] = LocalColumn(value)
    names = [name for name in PARTIAL if change.get(name, ()) is not None]
    rank.columns |= {name: rank.columns[PARTIAL[name]] for name in names}
    request = actor_pb2.GenerateSequencesRequest(sampling=SAMPLED)
    with pytest.raises(InvalidRequest, match=said):
        rank.call(rank.actor, "generate_sequences", request, "prompt", *names)


def test_segments_do_not_go_with_stop_strings(rank: OneRank) -> None:
    with pytest.raises(InvalidRequest, match="do not go with sampling"):
        begin(rank, actor_pb2.Sampling(max_new_tokens=6, temperature=1.0, stop=["x"]), 2)


def test_a_column_of_the_host_goes_to_the_device_in_one_copy() -> None:
    begun = Jagged(torch.arange(6.0), np.array([1, 2, 3]))
    with pretending() as log:
        new = Jagged(torch.tensor([7.0, 8.0, 9.0]).to(DEVICE), np.array([1, 2]))
        log.clear()
        column = extended(begun, [0, 2], new)
        assert (len(log.to_device), log.to_host, log.waits) == (1, [], [])
        assert column.values.tolist() == [0, 7, 1, 2, 3, 4, 5, 8, 9]
        assert column.lengths.tolist() == [2, 2, 5]
