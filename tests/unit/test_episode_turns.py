"""Turns of episodes on an actor's rank: exact tokens, the mask of sampled tokens, and no gradient from the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretend_device import pretending
from transformers import AutoModelForCausalLM
from unit.conftest import EOS_ID
from unit.one_rank import PROMPTS, OneRank

from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2, critic_pb2

pytestmark = pytest.mark.usefixtures("process_group")

TURN_TOKENS = 3
FIRST_STEP = 7
"""One whose random numbers end some first turns with an end-of-sequence token, and others not."""
SAMPLED = actor_pb2.Sampling(max_new_tokens=TURN_TOKENS, temperature=1.0)
PARTIAL = {
    "partial_ids": "response_ids",
    "partial_mask": "response_mask",
    "partial_log_probs": "rollout_log_probs",
}
SEQUENCE = ("prompt_ids", "response_ids", "response_mask")
LOG_PROB = actor_pb2.ComputeLogProbRequest(temperature=1.0)
OBSERVATIONS = ["w20", "<eos>w21", "w22", "<eos>", "", "w23"]
OBSERVED = [[20], [EOS_ID, 21], [22], [EOS_ID], [], [23]]


@pytest.fixture
def rank(tiny_llama_dir: Path) -> Iterator[OneRank]:
    rank = OneRank(tiny_llama_dir)
    rank.steps = FIRST_STEP
    yield rank
    rank.close()


def take_turn(
    rank: OneRank,
    observations: list[str] | None = None,
    sampling: actor_pb2.Sampling = SAMPLED,
    most: int = 40,
    **options: Any,
) -> None:
    request = actor_pb2.GenerateSequencesRequest(
        sampling=sampling, episode=True, max_response_tokens=most, return_text=True, **options
    )
    names = ["prompt"]
    if observations is not None:
        rank.columns |= {name: rank.columns[made] for name, made in PARTIAL.items()}
        rank.columns["observation"] = LocalColumn(observations)
        names += [*PARTIAL, "observation"]
    rank.call(rank.actor, "generate_sequences", request, *names)


def rows(rank: OneRank, name: str) -> list[list[float]]:
    column = rank.read(name)
    return column.tolist()


def texts(rank: OneRank, name: str) -> list[str]:
    column = rank.columns[name]
    assert isinstance(column, LocalColumn)
    return column.texts


def two_turns(rank: OneRank) -> None:
    take_turn(rank)
    take_turn(rank, OBSERVATIONS)


def test_a_turn_goes_on_from_the_tokens_that_were_sampled_and_those_of_the_observation(rank: OneRank) -> None:
    take_turn(rank)
    first, first_log_probs = rows(rank, "response_ids"), rows(rank, "rollout_log_probs")
    assert rows(rank, "response_mask") == [[1] * len(row) for row in first]
    assert {row[-1] == EOS_ID for row in first} == {True, False}, "the seed has turns of both kinds"
    assert texts(rank, "turn_end") == ["stop" if row[-1] == EOS_ID else "length" for row in first]
    take_turn(rank, OBSERVATIONS)
    for row, (ids, mask) in enumerate(
        zip(rows(rank, "response_ids"), rows(rank, "response_mask"), strict=True)
    ):
        begun, observed = first[row], OBSERVED[row]
        if begun[-1] == EOS_ID and observed[:1] == [EOS_ID]:
            observed = observed[1:]  # an end-of-sequence token that was sampled is not added again
        head = [*begun, *observed]
        assert ids[: len(head)] == head
        assert mask == [*[1] * len(begun), *[0] * len(observed), *[1] * (len(ids) - len(head))]
        assert 1 <= len(ids) - len(head) <= TURN_TOKENS
        log_probs = rank.read("rollout_log_probs").row(row)
        assert len(log_probs) == sum(mask)
        assert log_probs[: len(begun)].tolist() == first_log_probs[row]


def test_log_probabilities_are_those_of_a_dense_model_at_the_sampled_tokens(
    rank: OneRank, tiny_llama_dir: Path
) -> None:
    two_turns(rank)
    rank.call(rank.actor, "compute_log_prob", LOG_PROB, *SEQUENCE, "rollout_log_probs")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64)
    for row in range(len(PROMPTS)):
        expected = dense_log_probs(model, rank, row)[rank.read("response_mask").row(row).astype(bool)]
        for name in ("log_probs", "rollout_log_probs"):
            np.testing.assert_allclose(rank.read(name).row(row), expected.detach(), atol=1e-4)


def dense_log_probs(model: torch.nn.Module, rank: OneRank, row: int) -> torch.Tensor:
    """Log-probability of each response token of a row, observations included, without any packing or mask."""
    prompt, response = (torch.tensor(rows(rank, name)[row]) for name in ("prompt_ids", "response_ids"))
    logits = model(torch.cat([prompt, response])[None]).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize("packing", [True, False])
def test_the_gradient_is_that_of_the_sampled_tokens_alone(tiny_llama_dir: Path, packing: bool) -> None:
    """Compared with a dense float64 computation, which multiplies each token's loss by the mask."""
    rank = OneRank(tiny_llama_dir, packing=packing)
    rank.steps = FIRST_STEP
    try:
        two_turns(rank)
        sampled = rank.read("rollout_log_probs")
        rank.columns["log_probs"] = rank.columns["rollout_log_probs"]
        rank.columns["advantages"] = LocalColumn(np.linspace(-1, 1, len(PROMPTS), dtype=np.float32))
        model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(PROMPTS)):
            mask = torch.tensor(rows(rank, "response_mask")[row], dtype=torch.float64)
            old = torch.zeros_like(mask)
            old[mask.bool()] = torch.tensor(sampled.row(row), dtype=torch.float64)
            ratio = (dense_log_probs(model, rank, row) - old).exp()
            total = total - (np.linspace(-1, 1, len(PROMPTS))[row] * ratio * mask).sum()
        (total / sampled.lengths.sum()).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()

        request = actor_pb2.UpdateActorRequest(
            loss=actor_pb2.PolicyLoss(aggregation="token-mean", surrogate_options={"dual_clip": 0.0}),
            schedule=actor_pb2.Schedule(epochs=1, mini_batches=1),
            temperature=1.0,
        )
        metrics = rank.call(rank.actor, "update_actor", request, *SEQUENCE, "log_probs", "advantages")
        assert metrics["grad_norm"] == pytest.approx(float(expected), rel=1e-3)
        assert metrics["ratio"] == pytest.approx(1.0, abs=1e-3)
    finally:
        rank.close()


def test_on_a_device_tokens_and_gradient_are_the_same(tiny_llama_dir: Path) -> None:
    found = []
    for is_pretend in (False, True):
        with pretending() if is_pretend else nullcontext() as log:
            rank = OneRank(tiny_llama_dir, log)
            rank.steps = FIRST_STEP
            two_turns(rank)
            rank.call(rank.actor, "compute_log_prob", LOG_PROB, *SEQUENCE, "rollout_log_probs")
            rank.columns["advantages"] = LocalColumn(np.linspace(-1, 1, len(PROMPTS), dtype=np.float32))
            request = actor_pb2.UpdateActorRequest(
                loss=actor_pb2.PolicyLoss(),
                schedule=actor_pb2.Schedule(epochs=1, mini_batches=1),
                temperature=1.0,
            )
            metrics = rank.call(rank.actor, "update_actor", request, *SEQUENCE, "log_probs", "advantages")
            found.append((rows(rank, "response_ids"), metrics["grad_norm"]))
            rank.close()
    (ids, norm), (other_ids, other_norm) = found
    assert ids == other_ids
    assert norm == pytest.approx(other_norm, rel=1e-4)


def test_observations_have_no_values_and_the_critic_learns_from_the_sampled_tokens(rank: OneRank) -> None:
    two_turns(rank)
    rank.call(rank.critic, "compute_values", critic_pb2.ComputeValuesRequest(), *SEQUENCE)
    values, sampled = rank.read("values"), rank.read("rollout_log_probs").lengths
    assert values.lengths.tolist() == sampled.tolist()
    returns = Jagged(np.zeros(int(sampled.sum()), np.float32), sampled)
    rank.columns["returns"] = LocalColumn(returns)
    request = critic_pb2.UpdateCriticRequest(
        loss=critic_pb2.ValueLoss(), schedule=actor_pb2.Schedule(epochs=1, mini_batches=1)
    )
    metrics = rank.call(rank.critic, "update_critic", request, *SEQUENCE, "values", "returns")
    assert metrics["squared_error"] == pytest.approx(float(np.square(values.values).mean()), rel=1e-4)


def test_a_mask_of_ones_changes_no_bit(rank: OneRank) -> None:
    take_turn(rank)
    rank.call(rank.actor, "compute_log_prob", LOG_PROB, "prompt_ids", "response_ids")
    without = rank.read("log_probs").values.copy()
    rank.call(rank.actor, "compute_log_prob", LOG_PROB, *SEQUENCE)
    assert rank.read("log_probs").values.tolist() == without.tolist()


def test_an_episode_without_room_for_a_turn_stays_as_it_is(rank: OneRank) -> None:
    take_turn(rank)
    first = rows(rank, "response_ids")
    most = TURN_TOKENS + 3
    take_turn(rank, ["w20", "w21", "w22", "w23", "w24", "w25"], most=most)
    went_on = [len(row) + 1 + TURN_TOKENS <= most for row in first]
    assert set(went_on) == {True, False}
    for begun, now, said, goes in zip(
        first, rows(rank, "response_ids"), texts(rank, "turn"), went_on, strict=True
    ):
        assert (len(now) > len(begun) + 1) if goes else (now == begun and said == "")
    assert [bool(end) for end in texts(rank, "turn_end")] == went_on


def test_an_observation_with_a_token_beyond_the_embeddings_is_not_added_to_its_response(
    rank: OneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turn(rank)
    first = rows(rank, "response_ids")
    monkeypatch.setattr(rank.actor._texts, "_vocab_size", 22)
    take_turn(rank, ["w20", "w60", "w20", "w20", "w20", "w59"])
    ends = texts(rank, "turn_end")
    assert (
        ends[1] == "the observation contains the token 'w60', whose id 60 is beyond the model's 22 embeddings"
    )
    assert "'w59'" in ends[5]
    assert {ends[row] for row in (0, 2, 3, 4)} <= {"stop", "length"}
    for row, (begun, now) in enumerate(zip(first, rows(rank, "response_ids"), strict=True)):
        assert (now == begun) if row in (1, 5) else (now[: len(begun) + 1] == [*begun, 20])


def test_texts_are_those_of_the_turn_and_of_the_whole_response(rank: OneRank) -> None:
    two_turns(rank)
    decode = rank.actor.tokenizer.decode
    names = (rows(rank, name) for name in ("response_ids", "response_mask"))
    said = (texts(rank, name) for name in ("turn", "response"))
    for ids, mask, turn, whole in zip(*names, *said, strict=True):
        begun = len(mask) - mask[::-1].index(0) if 0 in mask else None
        assert whole == decode(ids, skip_special_tokens=True)
        if begun is not None:
            assert turn == decode(ids[begun:], skip_special_tokens=True)


def test_a_stop_string_ends_a_turn_and_stays_in_its_tokens(rank: OneRank) -> None:
    take_turn(rank)
    ids = rows(rank, "response_ids")
    row = next(row for row, tokens in enumerate(ids) if EOS_ID not in tokens[:2])
    stop = f"w{int(ids[row][1])}"
    rank.steps = FIRST_STEP  # the same random numbers
    take_turn(rank, sampling=actor_pb2.Sampling(max_new_tokens=TURN_TOKENS, temperature=1.0, stop=[stop]))
    assert rows(rank, "response_ids")[row] == ids[row][:2]
    assert stop not in texts(rank, "turn")[row]
    assert texts(rank, "turn_end")[row] == "stop"
    take_turn(rank, OBSERVATIONS)
    assert rows(rank, "response_ids")[row][: 2 + len(OBSERVED[row])] == [*ids[row][:2], *OBSERVED[row]]
    assert stop in texts(rank, "response")[row], "of an earlier turn, it is part of the response"


def test_a_stop_token_ends_a_turn_and_an_observation_does_not_repeat_it(rank: OneRank) -> None:
    take_turn(rank)
    ids = rows(rank, "response_ids")
    row = next(row for row, tokens in enumerate(ids) if EOS_ID not in tokens[:2])
    end = int(ids[row][1])
    sampling = actor_pb2.Sampling(max_new_tokens=TURN_TOKENS, temperature=1.0, stop_token_ids=[end])
    rank.steps = FIRST_STEP  # the same random numbers
    take_turn(rank, sampling=sampling)
    assert rows(rank, "response_ids")[row] == ids[row][:2]
    assert texts(rank, "turn_end")[row] == "stop"
    assert texts(rank, "turn")[row].endswith(f"w{end}"), "it is no special token"
    take_turn(rank, [f"w{end}"] * len(ids), sampling=sampling)
    assert len(rows(rank, "response_ids")[row]) > 2
    assert all(rows(rank, "response_mask")[row]), "nothing was added"


def test_the_text_of_a_last_turn_ends_before_its_stop_string_without_room_for_another_too(
    rank: OneRank,
) -> None:
    take_turn(rank)
    ids = rows(rank, "response_ids")
    row = next(row for row, tokens in enumerate(ids) if EOS_ID not in tokens[:2])
    stop = f"w{int(ids[row][1])}"
    sampling = actor_pb2.Sampling(max_new_tokens=TURN_TOKENS, temperature=1.0, stop=[stop])
    rank.steps = FIRST_STEP  # the same random numbers
    take_turn(rank, sampling=sampling)
    whole = texts(rank, "response")[row]
    assert stop not in whole
    take_turn(rank, OBSERVATIONS, sampling=sampling, most=TURN_TOKENS)
    assert rows(rank, "response_ids")[row] == ids[row][:2], "there is no room"
    assert texts(rank, "response")[row] == whole


def test_what_cannot_be_an_episode_is_refused(rank: OneRank) -> None:
    with pytest.raises(InvalidRequest, match="segment_tokens does not go with episode"):
        take_turn(rank, segment_tokens=2)
    with pytest.raises(InvalidRequest, match=r"at least sampling.max_new_tokens, 3 \(given: 2\)"):
        take_turn(rank, most=2)
    take_turn(rank)
    rank.columns["observation"] = LocalColumn(OBSERVATIONS)
    alone = actor_pb2.GenerateSequencesRequest(sampling=SAMPLED)
    with pytest.raises(InvalidRequest, match=r"columns \['observation'\] need episode"):
        rank.call(rank.actor, "generate_sequences", alone, "prompt", "observation")
    alone.episode, alone.max_response_tokens = True, 40
    with pytest.raises(InvalidRequest, match="partial_ids"):
        rank.call(rank.actor, "generate_sequences", alone, "prompt", "observation")
    rank.columns["response_mask"] = LocalColumn(Jagged(np.ones(6, np.uint8), np.ones(6, np.int64)))
    with pytest.raises(InvalidRequest, match="'partial_mask' does not fit"):
        take_turn(rank, OBSERVATIONS)
    with pytest.raises(InvalidRequest, match="'response_mask' does not have one value per token"):
        rank.call(rank.actor, "compute_log_prob", LOG_PROB, *SEQUENCE)
