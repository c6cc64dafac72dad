"""Updates with every surrogate, corrections and texts: the same however rows are cut and dealt out, and, with texts
alone, a plain language-model step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.conftest import Task
from integration.harness import TWO_STEPS, Service
from integration.test_update import (
    EVERYTHING,
    NUM_ROWS,
    ONE_STEP,
    SEQUENCES,
    TEMPERATURE,
    TOLERANCE,
    distance,
    make_rows,
    means,
    weights,
)
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest
from rlhf.v1 import actor_pb2
from services.roles.minibatch import deal

LEARNING_RATE, MAX_GRAD_NORM = 3e-4, 1.0
TEXTS = [
    "12+34=46",
    "",
    "1",
    "a longer text without numbers",
    "99+1=100",
    "7",
    "",
    "5+5=10",
    "x",
    "1+1=2",
    "0",
    "42",
]
INPUTS = (*SEQUENCES, "log_probs", "advantages")


def update_rows(*more: str) -> Batch:
    """Rows with texts, and rollout log-probabilities off those of training by a bit."""
    rows: Any = make_rows()
    old = rows["log_probs"].values
    noise = np.random.default_rng(3).normal(0, 0.3, len(old.values)).astype(np.float32)
    rollout = Jagged(old.values + noise, old.lengths)
    return (rows | Batch.of(pretrain_text=TEXTS, rollout_log_probs=rollout)).select((*INPUTS, *more))


def update(service: Service, rows: Batch, loss: actor_pb2.PolicyLoss, **options: Any) -> dict[str, float]:
    """The metrics of an update of two mini-batches."""
    return means(
        service.call("update_actor", rows, loss=loss, schedule=TWO_STEPS, temperature=TEMPERATURE, **options)
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["ppo", "gspo", "cispo"])
def test_an_update_does_not_depend_on_ranks_and_micro_batches(
    actor: Service, lone_actor: Service, tmp_path: Path, surrogate: str, level: str
) -> None:
    """Two ranks with one micro-batch each against one rank with micro-batches of a row or two."""
    loss = actor_pb2.PolicyLoss(
        surrogate=surrogate,
        aggregation="seq-mean-token-mean",
        rollout_correction="mask",
        rollout_correction_level=level,
        rollout_correction_low=0.7,
        rollout_correction_high=1.4,
        pretrain_coefficient=2.0,
    )
    loss.MergeFrom(EVERYTHING)
    rows = update_rows("ref_log_probs", "rollout_log_probs", "pretrain_text")
    whole, cut = (update(service, rows, loss) for service in (actor, lone_actor))
    assert whole == pytest.approx(cut, rel=TOLERANCE, abs=TOLERANCE)
    assert 0 < whole["rollout_cut"] < 1
    assert distance(weights(actor, tmp_path / "whole"), weights(lone_actor, tmp_path / "cut")) < TOLERANCE


def plain_step(model: Any, tokenizer: Any, optimizer: torch.optim.Optimizer, texts: Sequence[str]) -> float:
    """One step on the mean next-token cross-entropy over all tokens of the texts; returns the loss."""
    losses, tokens = [], 0
    for text in filter(None, texts):
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        losses.append(model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1))
        tokens += ids.shape[1] - 1
    loss = torch.stack(losses).sum() / tokens
    optimizer.zero_grad()
    (16 * loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", ["actor", "lone_actor"])
def test_with_zero_advantages_an_update_is_a_plain_language_model_step(
    request: pytest.FixtureRequest, task: Task, tmp_path: Path, name: str
) -> None:
    """Two mini-batches: also the moments of the optimizer are those of the plain steps."""
    service: Service = request.getfixturevalue(name)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    header = service.header()
    dealt = deal(np.arange(NUM_ROWS), 2, (header.seed, header.step, header.ordinal, 0))
    expected = [plain_step(model, tokenizer, optimizer, [TEXTS[row] for row in rows]) for rows in dealt]

    rows: Any = update_rows("pretrain_text")
    zeros = Jagged(np.zeros_like(rows["advantages"].values.values), rows["advantages"].values.lengths)
    loss = actor_pb2.PolicyLoss(pretrain_coefficient=16.0)
    found = update(service, rows | Batch.of(advantages=zeros), loss, header=header)
    assert found["loss"] == pytest.approx(16 * np.mean(expected), rel=TOLERANCE)
    learned = {key: value.detach() for key, value in model.state_dict().items()}
    moved = weights(service, tmp_path / "moved")
    assert distance(moved, {key: learned[key] for key in moved}) < TOLERANCE


def test_texts_that_are_all_empty_change_nothing(actor: Service, tmp_path: Path) -> None:
    rows: Any = update_rows("pretrain_text") | Batch.of(pretrain_text=[""] * NUM_ROWS)
    loss = actor_pb2.PolicyLoss(pretrain_coefficient=16.0)
    actor.save(tmp_path / "initial")
    update(actor, rows, loss)
    with_empty = weights(actor, tmp_path / "with")
    actor.load(tmp_path / "initial")
    update(actor, update_rows(), actor_pb2.PolicyLoss())
    assert distance(weights(actor, tmp_path / "without"), with_empty) == 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"surrogate": "trpo"}, "loss: surrogate: 'trpo' is unknown"),
        ({"rollout_correction": "mask", "rollout_correction_high": 2}, "needs column 'rollout_log_probs'"),
        ({"pretrain_coefficient": 1}, "column 'pretrain_text' is missing"),
        ({"pretrain_coefficient": -1}, "pretrain_coefficient: must be at least 0"),
    ],
)
def test_what_an_update_cannot_do_is_refused(lone_actor: Service, loss: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        lone_actor.call(
            "update_actor",
            update_rows(),
            loss=actor_pb2.PolicyLoss(**loss),
            schedule=ONE_STEP,
            temperature=TEMPERATURE,
        )
