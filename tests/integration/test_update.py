"""Services with a model agree with plain transformers, however rows are split over ranks; updates are atomic."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from integration.conftest import Task
from integration.harness import POLICY_LOSS, TWO_STEPS, VALUE_LOSS, Pending, Service, jagged, take_rows
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import PeerFailed, UpdateRejected
from rlhf.v1 import actor_pb2, critic_pb2
from services.roles.minibatch import deal

NUM_ROWS = 12
TEMPERATURE = 0.7
TOLERANCE = 1e-5
ONE_STEP = actor_pb2.Schedule(epochs=1, mini_batches=1)
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
DIGITS = (48, 58)
LONGEST = 9

Weights = dict[str, torch.Tensor]


def make_rows(count: int = NUM_ROWS) -> Batch:
    """Rows of very different lengths, a response of one token among them, with all that updates read."""
    generator = np.random.default_rng(11)
    prompts = [generator.integers(*DIGITS, 1 + (5 * i) % 8) for i in range(count)]
    lengths = [1 + (7 * i) % LONGEST for i in range(count)]

    def floats(mean: float, scale: float) -> Jagged[np.ndarray]:
        return jagged([generator.normal(mean, scale, n) for n in lengths], np.float32)

    return Batch.of(
        prompt_ids=jagged(prompts, np.int64),
        response_ids=jagged([generator.integers(*DIGITS, n) for n in lengths], np.int64),
        log_probs=floats(-2, 0.3),
        ref_log_probs=floats(-2, 0.3),
        advantages=floats(0, 1),
        values=floats(0, 0.2),
        returns=floats(0, 1),
    )


SEQUENCES = ("prompt_ids", "response_ids")
ACTOR_INPUTS = (*SEQUENCES, "log_probs", "advantages", "ref_log_probs")
CRITIC_INPUTS = (*SEQUENCES, "values", "returns")
EVERYTHING = actor_pb2.PolicyLoss(
    surrogate_options={"clip_low": 0.2, "clip_high": 0.3},
    entropy_coefficient=0.01,
    kl_loss_coefficient=0.1,
    max_response_tokens=LONGEST,
)


def start_update(service: Service, rows: Batch, **options: Any) -> Pending:
    """An update of either role, of two mini-batches unless told otherwise."""
    if service.description.role == "critic":
        given = {"loss": VALUE_LOSS, "schedule": TWO_STEPS, **options}
        return service.start("update_critic", rows.select(CRITIC_INPUTS), **given)
    given = {"loss": EVERYTHING, "schedule": TWO_STEPS, "temperature": TEMPERATURE, **options}
    return service.start("update_actor", rows.select(ACTOR_INPUTS), **given)


def update(service: Service, rows: Batch, **options: Any) -> list[Any]:
    return start_update(service, rows, **options).responses()


def means(responses: list[Any]) -> dict[str, float]:
    """The metrics of a call over all ranks, as a controller merges them."""
    sums: dict[str, list[float]] = {}
    for response in responses:
        for name, mean in response.outcome.metrics.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += mean.sum
            entry[1] += mean.count
    return {name: total / count for name, (total, count) in sums.items()}


def weights(service: Service, directory: Path) -> Weights:
    service.export(directory)
    found = load_file(directory / "model.safetensors")
    head = directory / "value_head.safetensors"
    return found | (load_file(head) if head.exists() else {})


def distance(one: Weights, other: Weights) -> float:
    """The largest difference of a weight, relative to the norm of its tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


def assert_close(one: Jagged[np.ndarray], other: Jagged[np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert one.lengths.tolist() == other.lengths.tolist()
    np.testing.assert_allclose(one.values, other.values, rtol=tolerance, atol=tolerance)


def plain_log_probs(model: Any, batch: Batch, temperature: float) -> Jagged[np.ndarray]:
    """Each row on its own through a plain transformers forward, in float64 after the logits."""
    columns: Any = batch.columns
    rows = zip(
        take_rows(columns["prompt_ids"].values), take_rows(columns["response_ids"].values), strict=True
    )
    found = []
    for prompt, response in rows:
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature
        found.append(logits.log_softmax(-1).gather(-1, torch.from_numpy(response)[:, None])[:, 0].numpy())
    return jagged(found, np.float64)


@pytest.fixture(scope="module")
def policy(task: Task) -> Any:
    return AutoModelForCausalLM.from_pretrained(task.model).eval()


@pytest.mark.parametrize("name", ["actor", "lone_actor", "reference"])
def test_log_probs_equal_a_plain_forward(request: pytest.FixtureRequest, policy: Any, name: str) -> None:
    service: Service = request.getfixturevalue(name)
    sequences = make_rows().select(SEQUENCES)
    method, column = (
        ("compute_ref_log_prob", "ref_log_probs")
        if name == "reference"
        else ("compute_log_prob", "log_probs")
    )
    log_probs = service.column(method, sequences, column, temperature=TEMPERATURE)
    assert_close(log_probs, plain_log_probs(policy, sequences, TEMPERATURE))


def test_the_entropy_is_that_of_a_plain_forward(actor: Service, policy: Any) -> None:
    sequences: Any = make_rows().select(SEQUENCES)
    entropies = []
    for prompt, response in zip(
        take_rows(sequences["prompt_ids"].values), take_rows(sequences["response_ids"].values), strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
        entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
    responses = actor.call("compute_log_prob", sequences, temperature=TEMPERATURE)
    assert means(responses)["entropy"] == pytest.approx(np.mean(entropies), rel=TOLERANCE)


@pytest.mark.parametrize("name", ["actor", "lone_actor"])
def test_rollout_log_probs_equal_recomputed_ones_also_after_an_update(
    request: pytest.FixtureRequest, name: str
) -> None:
    service: Service = request.getfixturevalue(name)
    update(service, make_rows())
    sampling = actor_pb2.Sampling(temperature=TEMPERATURE, max_new_tokens=6)
    prompts = Batch.of(prompt=["1", "12+3=", "99+99=", "7+7", "55+5="] * 3)
    made = service.rows("generate_sequences", prompts, sampling=sampling)
    rollout = service.values(made, "rollout_log_probs")
    recomputed = service.column(
        "compute_log_prob", made.select(SEQUENCES), "log_probs", temperature=TEMPERATURE
    )
    assert len(set(rollout.lengths.tolist())) > 1
    assert_close(rollout, recomputed, 1e-4)


def test_a_stop_string_ends_a_response_whose_text_ends_before_it(actor: Service, task: Task) -> None:
    sampling = actor_pb2.Sampling(temperature=2.0, max_new_tokens=12, stop=["7", "12"])
    made = actor.rows(
        "generate_sequences", Batch.of(prompt=["12+3="] * 64), sampling=sampling, return_text=True
    )
    tokens = [row.tolist() for row in take_rows(actor.values(made, "response_ids"))]
    whole = AutoTokenizer.from_pretrained(task.model).batch_decode(tokens, skip_special_tokens=True)
    response: Any = made["response"]
    stopped = [text.endswith(("7", "12")) for text in whole]
    assert 0 < sum(stopped) < len(stopped)
    for text, ends, shown in zip(whole, stopped, response.texts, strict=True):
        assert not any(stop in text[:-1] for stop in sampling.stop)
        assert shown == (re.sub("(7|12)$", "", text) if ends else text)


@pytest.mark.parametrize("name", ["actor", "lone_actor"])
def test_the_pretraining_loss_is_that_of_transformers(
    request: pytest.FixtureRequest, policy: Any, task: Task, name: str
) -> None:
    service: Service = request.getfixturevalue(name)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    texts = ["12+34=46", "1", "a longer text without numbers", "99+1=100", "7"]
    expected, tokens = [], []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            expected.append(policy(input_ids=ids, labels=ids).loss.item())
        tokens.append(ids.shape[1] - 1)
    responses = service.call("compute_loss", Batch.of(text=texts))
    losses = service.values(service.made(responses), "pretrain_loss")
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE)
    mean = sum(loss * n for loss, n in zip(expected, tokens, strict=True)) / sum(tokens)
    assert means(responses)["pretrain_loss"] == pytest.approx(mean, rel=TOLERANCE)


def test_values_equal_a_plain_forward(critic: Service, tmp_path: Path) -> None:
    rows = make_rows()
    update(critic, rows)
    critic.export(tmp_path / "critic")
    backbone = AutoModel.from_pretrained(tmp_path / "critic").eval()
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    sequences: Any = rows.select(SEQUENCES)
    expected = []
    for prompt, response in zip(
        take_rows(sequences["prompt_ids"].values), take_rows(sequences["response_ids"].values), strict=True
    ):
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            hidden = backbone(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        expected.append((hidden @ head["weight"][0] + head["bias"]).numpy())
    values = critic.column("compute_values", sequences, "values")
    assert np.abs(values.values).max() > 1e-3, "the head has moved away from zero"
    assert_close(values, jagged(expected, np.float32))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_update_of_the_actor_does_not_depend_on_ranks_and_micro_batches(
    actor: Service, lone_actor: Service, tmp_path: Path, aggregation: str
) -> None:
    """Two ranks with one micro-batch each against one rank with micro-batches of a row or two."""
    loss = actor_pb2.PolicyLoss(aggregation=aggregation)
    loss.MergeFrom(EVERYTHING)
    whole, cut = (means(update(service, make_rows(), loss=loss)) for service in (actor, lone_actor))
    assert whole == pytest.approx(cut, rel=TOLERANCE, abs=TOLERANCE)
    assert math.isfinite(whole["grad_norm"])
    assert distance(weights(actor, tmp_path / "whole"), weights(lone_actor, tmp_path / "cut")) < TOLERANCE


@pytest.mark.parametrize("name", ["actor", "lone_actor"])
@pytest.mark.parametrize("moves", [False, True])
def test_an_update_that_was_prepared_is_that_of_one_call(
    request: pytest.FixtureRequest, name: str, moves: bool, tmp_path: Path
) -> None:
    """With `moves`, rows are prepared on other ranks than the update has them on, which computes them again."""
    service: Service = request.getfixturevalue(name)
    service.save(tmp_path / "initial")
    rows, loss = make_rows(), actor_pb2.PolicyLoss(aggregation="seq-mean-token-mean")
    loss.MergeFrom(EVERYTHING)
    alone = means(update(service, rows, loss=loss))
    expected = weights(service, tmp_path / "alone")
    service.load(tmp_path / "initial")
    versions = service.versions
    for chunk in (range(5), range(5, 8)):
        prepare(service, rows, loss, chunk, moves=moves)
    assert service.versions == versions
    found = means(update(service, rows, loss=loss, prepared=True))
    assert found == pytest.approx(alone, rel=TOLERANCE, abs=TOLERANCE)
    assert service.versions == [versions[0] + 1] * len(versions)
    assert distance(weights(service, tmp_path / "prepared"), expected) < TOLERANCE


def prepare(
    service: Service, rows: Batch, loss: actor_pb2.PolicyLoss, chunk: range, *, moves: bool = False
) -> None:
    """Prepares an update of all rows by some, on the ranks that it has them on, or on those after them."""
    fields = {"loss": loss, "schedule": TWO_STEPS, "temperature": TEMPERATURE, "rows": rows.rows}
    header = service.header()
    dealt = np.array_split(np.arange(rows.rows), len(service.ranks))
    requests = {}
    for rank in service.ranks:
        places = dealt[(rank + moves) % len(dealt)]
        mine = places[np.isin(places, chunk)]
        batch = wire.to_proto(rows.select(ACTOR_INPUTS).take(mine), mine)
        requests[rank] = actor_pb2.PrepareUpdateRequest(call=header, batch=batch, **fields)
    service.send("prepare_update", requests).responses()


def test_an_update_of_the_critic_does_not_depend_on_ranks_and_micro_batches(
    critic: Service, cut_critic: Service, tmp_path: Path
) -> None:
    """One rank with one micro-batch against two ranks with micro-batches of a row or two."""
    rows = make_rows()
    whole, cut = (means(update(service, rows)) for service in (critic, cut_critic))
    assert whole == pytest.approx(cut, rel=TOLERANCE, abs=TOLERANCE)
    assert distance(weights(critic, tmp_path / "whole"), weights(cut_critic, tmp_path / "cut")) < TOLERANCE
    values = [
        service.column("compute_values", rows.select(SEQUENCES), "values") for service in (critic, cut_critic)
    ]
    assert_close(*values)


def test_an_update_moves_every_weight_a_bit(actor: Service, tmp_path: Path) -> None:
    before = weights(actor, tmp_path / "before")
    update(actor, make_rows())
    after = weights(actor, tmp_path / "after")
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    assert min(moved.values()) > 0
    assert max(moved.values()) < 1e-2


@pytest.mark.parametrize("name", ["actor", "cut_critic"])
def test_fewer_rows_than_ranks_give_the_same_as_one_rank(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    two: Service = request.getfixturevalue(name)
    one: Service = request.getfixturevalue("lone_actor" if name == "actor" else "critic")
    row = make_rows(1)
    first, second = (means(update(service, row, schedule=ONE_STEP)) for service in (two, one))
    assert first == pytest.approx(second, rel=TOLERANCE, abs=TOLERANCE)
    assert two.versions == [one.versions[0]] * 2
    assert distance(weights(two, tmp_path / "two"), weights(one, tmp_path / "one")) < TOLERANCE


def test_a_rank_without_rows_takes_part_in_everything(actor: Service, lone_actor: Service) -> None:
    prompt = Batch.of(prompt=["12+34="])
    sampling = actor_pb2.Sampling(temperature=TEMPERATURE, max_new_tokens=4)
    two, one = (
        service.rows("generate_sequences", prompt, sampling=sampling, return_text=True)
        for service in (actor, lone_actor)
    )
    assert two.rows == 1
    assert_close(actor.values(two, "response_ids"), lone_actor.values(one, "response_ids"), 0)
    log_probs = [
        service.column("compute_log_prob", made.select(SEQUENCES), "log_probs", temperature=TEMPERATURE)
        for service, made in ((actor, two), (lone_actor, one))
    ]
    assert_close(*log_probs)
    losses = [
        service.column("compute_loss", Batch.of(text=["1+1=2"]), "pretrain_loss")
        for service in (actor, lone_actor)
    ]
    np.testing.assert_allclose(*losses, rtol=TOLERANCE)


BAD = {"actor": "advantages", "lone_actor": "advantages", "cut_critic": "returns", "critic": "returns"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["only", "first", "second"])
@pytest.mark.parametrize("name", list(BAD))
def test_an_update_that_is_not_finite_is_rejected_on_every_rank_and_leaves_no_trace(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, where: str, value: float
) -> None:
    """One bad token in one row of one rank, of the only mini-batch or of two; where it is in the second, the first has
    stepped already."""
    service: Service = request.getfixturevalue(name)
    rows, versions, before = make_rows(), service.versions, service.export(tmp_path / "before")
    header = service.header()
    key = (header.seed, header.step, header.ordinal, 0)
    mini_batches = deal(np.arange(NUM_ROWS), 2, key)
    poisoned = poison(rows, BAD[name], int(mini_batches[where == "second"][0]), value)
    schedule = ONE_STEP if where == "only" else TWO_STEPS
    for outcome in start_update(service, poisoned, header=header, schedule=schedule).outcomes():
        assert isinstance(outcome, UpdateRejected)
        assert f"policy version {versions[0]}" in str(outcome)
    assert service.versions == versions
    assert service.export(tmp_path / "after") == before


def poison(rows: Batch, column: str, row: int, value: float) -> Batch:
    """The rows with one number of a float column replaced."""
    columns: Any = rows.columns
    floats = columns[column].values
    values = floats.values.copy()
    values[floats.offsets[row]] = value
    return rows | Batch.of(**{column: Jagged(values, floats.lengths)})


@pytest.mark.parametrize("name", ["actor", "lone_actor", "cut_critic"])
def test_after_a_rejected_update_the_next_is_that_of_a_service_without_one(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    service: Service = request.getfixturevalue(name)
    initial = tmp_path / "initial"
    service.save(initial)
    good = make_rows()
    update(service, good)
    expected = service.export(tmp_path / "expected")
    service.load(initial)
    header = service.header()
    second = deal(np.arange(NUM_ROWS), 2, (header.seed, header.step, header.ordinal, 0))[1]
    outcomes = start_update(
        service, poison(good, BAD[name], int(second[0]), np.nan), header=header
    ).outcomes()
    assert not any(isinstance(outcome, PeerFailed) for outcome in outcomes)
    update(service, good)
    assert service.export(tmp_path / "found") == expected


@pytest.mark.parametrize("name", ["actor", "lone_actor", "cut_critic"])
def test_a_sharded_checkpoint_brings_back_weights_moments_and_version(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    service: Service = request.getfixturevalue(name)
    rows = make_rows()
    update(service, rows)
    service.save(tmp_path / "checkpoint")
    saved, versions = service.export(tmp_path / "saved"), service.versions
    update(service, rows)
    expected = service.export(tmp_path / "expected")
    update(service, rows)
    service.load(tmp_path / "checkpoint")
    assert service.versions == versions
    assert service.export(tmp_path / "loaded") == saved
    update(service, rows)
    assert service.export(tmp_path / "again") == expected


def test_a_checkpoint_of_two_ranks_goes_on_on_one(
    actor: Service, lone_actor: Service, tmp_path: Path
) -> None:
    rows = make_rows()
    update(actor, rows)
    actor.save(tmp_path / "checkpoint")
    lone_actor.load(tmp_path / "checkpoint")
    assert lone_actor.versions == actor.versions[:1]
    for service in (actor, lone_actor):
        update(service, rows)
    assert distance(weights(actor, tmp_path / "two"), weights(lone_actor, tmp_path / "one")) < TOLERANCE


def test_a_loaded_checkpoint_is_what_generates(lone_actor: Service, tmp_path: Path) -> None:
    """Also where other weights had the same version before the load."""
    prompts = Batch.of(prompt=["12+34=", "9+9="])
    greedy = actor_pb2.Sampling(greedy=True, max_new_tokens=4)

    def rollout() -> np.ndarray:
        return lone_actor.column("generate_sequences", prompts, "rollout_log_probs", sampling=greedy).values

    lone_actor.save(tmp_path / "initial")
    update(lone_actor, make_rows())
    expected = rollout()
    lone_actor.save(tmp_path / "updated")
    lone_actor.load(tmp_path / "initial")
    update(lone_actor, make_rows(4))
    assert not np.array_equal(rollout(), expected)
    lone_actor.load(tmp_path / "updated")
    assert np.array_equal(rollout(), expected)


def test_a_checkpoint_that_is_not_there_is_refused_and_changes_nothing(
    actor: Service, tmp_path: Path
) -> None:
    before = actor.export(tmp_path / "before")
    for outcome in actor.start("load_checkpoint", directory=str(tmp_path / "nowhere")).outcomes():
        assert isinstance(outcome, PeerFailed) or "no checkpoint" in str(outcome)
    assert actor.export(tmp_path / "after") == before


def test_loss_of_the_critic_is_that_of_the_formula(critic: Service) -> None:
    """A fresh critic says 0, so its first loss is 1/2 mean of the squared returns, clipped as FORMULAS have it."""
    rows: Any = make_rows()
    values, returns = rows["values"].values.values, rows["returns"].values.values
    clipped = np.clip(0.0, values - 0.5, values + 0.5)
    expected = np.maximum(returns**2, (clipped - returns) ** 2).mean() / 2
    loss = critic_pb2.ValueLoss(value_loss_options={"value_clip": 0.5})
    assert means(update(critic, rows, loss=loss, schedule=ONE_STEP))["loss"] == pytest.approx(
        expected, rel=1e-5
    )


def test_loss_of_the_actor_is_that_of_the_formula(actor: Service) -> None:
    rows: Any = make_rows()
    log_probs = actor.column("compute_log_prob", rows.select(SEQUENCES), "log_probs", temperature=TEMPERATURE)
    ratio = np.exp((log_probs.values - rows["log_probs"].values.values).astype(np.float64))
    advantages = rows["advantages"].values.values.astype(np.float64)
    losses = np.maximum(-advantages * ratio, -advantages * ratio.clip(0.8, 1.2))
    expected = np.where(advantages < 0, np.minimum(losses, -3 * advantages), losses).mean()
    found = means(update(actor, rows, loss=POLICY_LOSS, schedule=ONE_STEP))
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
