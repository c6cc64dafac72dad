"""Rows that a load test sends."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.data.prompt_form import PromptForm
from controller.data.prompt_source import PromptSource
from controller.data.readers import open_rows
from loadtest.methods import find_method, offered
from loadtest.payloads import Lengths, Shape, make_batches, to_batch, to_text_rows
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import ConfigError
from rlhf.roles import BUILT_IN

IDS = ("prompt_ids", "response_ids")
TEXT = ("prompt", "response", "ground_truth", "metadata", "response_tokens")
SHAPE = Shape(rows=3, prompt=Lengths(2, 5), response=Lengths(4, 4), vocabulary=7, seed=0)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_ids_that_are_made_up_have_the_lengths_and_the_vocabulary_asked_for() -> None:
    rows = [row for batch in make_batches(IDS, SHAPE, None) for row in batch]
    assert {len(row["prompt_ids"]) for row in rows} == {2, 3, 4, 5}
    assert {len(row["response_ids"]) for row in rows} == {4}
    assert {token for row in rows for token in row["prompt_ids"]} == set(range(7))


def test_the_seed_decides() -> None:
    other = Shape(3, SHAPE.prompt, SHAPE.response, 7, seed=1)
    assert make_batches(TEXT, SHAPE, None) == make_batches(TEXT, SHAPE, None)
    assert make_batches(TEXT, SHAPE, None) != make_batches(TEXT, other, None)


def test_a_batch_travels_inline_and_comes_back() -> None:
    (rows, *_) = make_batches(IDS, SHAPE, None)
    back = wire.from_proto(wire.to_proto(to_batch(rows, IDS)))
    column = back["prompt_ids"]
    assert isinstance(column, LocalColumn)
    assert isinstance(column.values, Jagged)
    assert [column.values.row(row).tolist() for row in range(3)] == [row["prompt_ids"] for row in rows]


def test_rows_of_a_file_go_round_and_lack_nothing(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "ground_truth": 2, "data_source": "sums"}
    path = write(tmp_path / "rows.jsonl", row, {"prompt": "2+2=", "response": "5"})
    batches = make_batches(TEXT, SHAPE, path)
    sent = to_text_rows(batches[0])
    assert [text.prompt for text in sent] == ["1+1=", "2+2=", "1+1="]
    assert [text.ground_truth for text in sent] == ["2", sent[1].ground_truth, "2"]
    assert sent[1].ground_truth
    assert sent[1].response == "5"
    assert len(sent[0].response) == 4
    assert dict(sent[0].metadata) == {"data_source": "sums"}


def test_text_rows_have_the_number_of_tokens_of_their_responses(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"response": "yes", "response_tokens": 2}, {"response": "no"})
    counted, uncounted, made_up = (
        to_text_rows(make_batches(TEXT, SHAPE, data)[0])[row]
        for data, row in ((path, 0), (path, 1), (None, 0))
    )
    assert (counted.response_tokens, dict(counted.metadata)) == (2, {})
    assert (uncounted.HasField("response_tokens"), uncounted.response_tokens) == (True, len("no"))
    assert made_up.response_tokens == len(made_up.response) == 4


@pytest.mark.parametrize(
    ("given", "sent"), [(0, "0"), (False, "False"), (None, ""), (["a", 1], '["a", 1]'), ("2", "2")]
)
def test_a_ground_truth_is_sent_as_a_run_sends_it(tmp_path: Path, given: Any, sent: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "p", "ground_truth": given})
    (row, *_) = to_text_rows(make_batches(TEXT, SHAPE, path)[0])
    assert row.ground_truth == sent
    assert row.ground_truth == PromptSource(open_rows(path, "data"), PromptForm())[0].ground_truth


def test_ids_of_a_file_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt_ids": [1, 2], "response_ids": []})
    assert make_batches(IDS, SHAPE, path)[0][0] == {"prompt_ids": [1, 2], "response_ids": []}


def test_no_rows_are_a_call_too() -> None:
    assert make_batches(IDS, Shape(0, SHAPE.prompt, SHAPE.response, 7, 0), None) == [[]]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "has no rows"),
        ("[1]\n", "1: not a JSON object"),
        ("{\n", "1: not JSON"),
        ('{"prompt": 1}\n', "not text"),
        ('{"response_tokens": -1}\n', "not a number of tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, content: str, cause: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=cause):
        make_batches(TEXT, SHAPE, path)


@pytest.mark.parametrize("text", ["", "x", "5-", "5-x", "9-3", "-4"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="length"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    "name", ["UpdateActor", "update_actor", "SaveCheckpoint", "Offload", "Cancel", "Watch"]
)
def test_what_changes_a_service_is_not_offered(name: str) -> None:
    with pytest.raises(ConfigError, match="changes the service"):
        find_method("actor", name)


@pytest.mark.parametrize("role", BUILT_IN)
def test_methods_are_found_by_both_names(role: str) -> None:
    for name, method in offered(role).items():
        assert find_method(role, name) is find_method(role, method.snake_name) is method


def test_an_unknown_method_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: ComputeReward, Describe, Synchronize, Check"):
        find_method("reward", "Score")
