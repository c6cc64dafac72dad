"""Rows stay on the disk, and those that are too long are left out when they are drawn."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.config.config import Config
from controller.data.chat import Chat
from controller.data.draws import Limit, draw, overlong_share, prompt_limit, rows_that_fit, text_limit
from controller.data.loader import Loader
from controller.data.prompt_source import Prompt
from controller.data.prompts import PromptData, TextData
from controller.data.readers import open_rows
from controller.data.text_files import MAX_DEPTH
from controller.role_groups.verdicts import text_rows
from nccl_transfer.refs.batch import Batch
from rlhf.errors import ConfigError, InvalidRequest
from rlhf.v1 import reward_pb2, worker_pb2

LENGTHS = (3, 9, 4, 5, 2, 8, 1)


def text_of(prompt: Prompt) -> str:
    return prompt.text


def limit_of(tokens: int, *, refuses: bool = False) -> Limit:
    return Limit(tokens, "a test", lambda texts: [len(text) for text in texts], refuses)


@pytest.fixture
def data(tmp_path: Path) -> PromptData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * length}) + "\n\n" for length in LENGTHS))
    return PromptData.load(path, "data.train")


def test_a_million_rows_take_a_few_megabytes(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", 30_000
    with path.open("w") as file:
        file.writelines(
            json.dumps({"prompt": f"{row} " + "x" * 200, "ground_truth": str(row), "level": row % 3}) + "\n"
            for row in range(rows)
        )
    tracemalloc.start()
    data = PromptData.load(path, "data.train")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10 * rows + 100_000
    assert peak < 30 * rows + 200_000
    assert [prompt.ground_truth for prompt in (data[rows - 1], data[0])] == [str(rows - 1), "0"]


def test_rows_that_are_too_long_are_left_out_and_counted(data: PromptData) -> None:
    loader = Loader(data.sizes, [1.0], seed=0)
    drawn = [len(prompt.text) for prompt in draw(data, loader, 10, limit_of(5), text_of)]
    assert set(drawn) == {length for length in LENGTHS if length <= 5}
    (position,) = loader.state.positions
    assert position.epoch * len(LENGTHS) + position.index == 10 + position.left_out
    assert position.left_out >= 2


def test_a_run_that_goes_on_leaves_out_the_same_rows(data: PromptData) -> None:
    whole, first, second = (Loader(data.sizes, [1.0], seed=3) for _ in range(3))
    expected = draw(data, whole, 24, limit_of(5), text_of)
    begun = draw(data, first, 11, limit_of(5), text_of)
    second.restore(first.state)
    assert begun + draw(data, second, 13, limit_of(5), text_of) == expected
    assert second.state == whole.state


def test_without_a_limit_every_row_is_drawn(data: PromptData) -> None:
    drawn = draw(data, Loader(data.sizes, [1.0], seed=0), len(LENGTHS), None, text_of)
    assert sorted(len(prompt.text) for prompt in drawn) == sorted(LENGTHS)


def test_a_row_that_is_too_long_may_be_an_error_that_names_it(data: PromptData) -> None:
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:3: 9 tokens are more than the 8 of a test; data\.overlong"
    ):
        draw(data, Loader(data.sizes, [1.0], seed=0), 7, limit_of(8, refuses=True), text_of)


def test_data_of_which_every_row_is_too_long_is_an_error(data: PromptData) -> None:
    with pytest.raises(
        ConfigError, match="every row of source 1 is left out: more than the 0 tokens of a test"
    ):
        draw(data, Loader(data.sizes, [1.0], seed=0), 1, limit_of(0), text_of)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1, and all rows after it: more than the 0 tokens"):
        rows_that_fit(data, limit_of(0), text_of)


def test_held_out_rows_that_are_too_long_are_left_out_in_order(data: PromptData) -> None:
    assert rows_that_fit(data, limit_of(4), text_of).tolist() == [0, 2, 4, 6]
    assert overlong_share(data, limit_of(4), text_of) == (3, len(LENGTHS))


def test_texts_that_are_too_long_are_left_out_too(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in LENGTHS))
    texts = TextData.load(path, "data.pretrain")
    drawn = draw(texts, Loader([len(texts)], [1.0], 0, "pretrain"), 5, limit_of(5), str)
    assert sorted(map(len, drawn)) == [1, 2, 3, 4, 5]


def config(tokenizer: Path, **data: Any) -> Config:
    files = {"train": "a.jsonl", "heldout": "b.jsonl", "tokenizer": tokenizer}
    actor = {"role": "actor", "address": "127.0.0.1:7101", "model": tokenizer, "rollout_tokens": 500}
    tables = {
        "data": {**files, **data},
        "rollout": {"max_response_tokens": 100},
        "services": {"actor": actor},
    }
    return Config.model_validate(tables)


SERVICES = {"actor": worker_pb2.DescribeResponse(max_tokens=600)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    return path


def test_the_limit_is_what_the_smallest_service_takes_beside_a_response(tokenizer: Path) -> None:
    limit = prompt_limit(config(tokenizer), SERVICES)
    assert limit is not None
    assert (limit.tokens, limit.refuses) == (400, False)
    assert limit.why == "services.actor.rollout_tokens, 500 less rollout.max_response_tokens"
    assert limit.count(["a b a", ""]) == [3, 0]
    texts = text_limit(config(tokenizer), {"actor": worker_pb2.DescribeResponse(max_tokens=450)})
    assert texts is not None
    assert texts.tokens == 449


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_are_counted_without_the_padding_and_truncation_of_a_tokenizer_file(
    tokenizer: Path, tmp_path: Path, side: str
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    words.enable_padding(direction=side)
    words.enable_truncation(4)
    words.save(str(tmp_path / "tokenizer.json"))
    assert Chat(tmp_path).count(["a", "a b a b a b", ""]) == [1, 6, 0]


def test_texts_to_learn_are_limited_by_actors_alone(tokenizer: Path) -> None:
    tables = config(tokenizer).model_dump()
    tables["services"]["critic"] = {"role": "critic", "address": "127.0.0.1:7102", "model": tokenizer}
    told = {**SERVICES, "critic": worker_pb2.DescribeResponse(max_tokens=20)}
    limit = text_limit(Config.model_validate(tables), told)
    assert limit is not None
    assert (limit.tokens, limit.why) == (499, "services.actor.rollout_tokens, 500 less an end")


def test_a_limit_that_is_given_counts_where_it_is_lower(tokenizer: Path) -> None:
    limit = prompt_limit(config(tokenizer, max_prompt_tokens=7, overlong="error"), SERVICES)
    assert limit is not None
    assert (limit.tokens, limit.why, limit.refuses) == (7, "data.max_prompt_tokens", True)


def test_tokens_that_cannot_be_counted_are_an_error_only_where_a_limit_is_asked_for(tmp_path: Path) -> None:
    assert prompt_limit(config(tmp_path), SERVICES) is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    assert prompt_limit(config(tmp_path / "broken"), SERVICES) is None
    for asked in ({"max_prompt_tokens": 7}, {"overlong": "error"}):
        with pytest.raises(ConfigError, match=r"has no tokenizer\.json, by which tokens are counted"):
            prompt_limit(config(tmp_path, **asked), SERVICES)


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"max_prompt_tokens": 7}, "data.max_prompt_tokens"),
        ({"overlong": "error"}, 'data.overlong = "error"'),
    ],
)
def test_the_key_that_asks_for_a_count_is_named_where_there_is_no_tokenizer(
    asked: dict[str, Any], key: str
) -> None:
    tables = {
        "data": {"train": "a.jsonl", "heldout": "b.jsonl", **asked},
        "services": {"reward": {"role": "reward", "address": "127.0.0.1:7104", "function": "length"}},
    }
    with pytest.raises(ConfigError, match=f"^{key}: needs data.tokenizer"):
        prompt_limit(Config.model_validate(tables), {"reward": worker_pb2.DescribeResponse(max_tokens=600)})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "n": NaN}', "rows.jsonl:4: not JSON: NaN is not a number"),
        (b'{"prompt": "a", "n": 1e999}', "rows.jsonl:4: not JSON: 1e999 is too large"),
        (
            b'{"prompt": "a", "n": ' + b"1" * 400 + b"}",
            "rows.jsonl:4: not JSON: a number of 400 digits is too large",
        ),
        (
            b'{"prompt": "a", "n": ' + b"[" * 32 + b"]" * 32 + b"}",
            "rows.jsonl:4: not JSON: nested more than 32 deep",
        ),
        (b"[" * 200_000 + b"]" * 200_000, "rows.jsonl:4: not JSON: .*recursion"),
        (b'{"prompt": "\\ud800"}', "rows.jsonl:4: not JSON: .*surrogates not allowed"),
        (b'{"prompt": "\xff"}', "rows.jsonl:4: not UTF-8: invalid start byte at byte 12"),
    ],
)
def test_a_line_that_is_no_row_is_named_blank_lines_included(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\n \t\n' + line)
    with pytest.raises(ConfigError, match=message):
        PromptData.load(path, "data.train")


@pytest.mark.parametrize("kind", ["object", "list"])
def test_metadata_of_a_row_that_was_accepted_reaches_a_reward(tmp_path: Path, kind: str) -> None:
    value: Any = -(10**308)
    for _ in range(MAX_DEPTH - 1):
        value = {"a": value} if kind == "object" else [value]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "n": value}))
    (row,) = text_rows(PromptData.load(path, "data.train").batch([0]).result(["prompt", "metadata"]))
    request = reward_pb2.ComputeRewardRequest(text_rows=[row])
    assert reward_pb2.ComputeRewardRequest.FromString(request.SerializeToString()) == request


def test_metadata_that_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"metadata '\{': Failed to load JSON"):
        text_rows(Batch.of(metadata=["{"]))


def test_a_damaged_archive_is_told_with_its_key(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"prompt": "a"}\n' * 1000, mtime=0))
    packed[12:20] = bytes(8)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(ConfigError, match=r"data\.train: .*rows\.jsonl\.gz: Error -3 while decompressing"):
        PromptData.load(path, "data.train")


def test_a_line_separator_of_unicode_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    rows = open_rows(path, "data.train")
    assert (len(rows), rows[0]["prompt"]) == (1, "a\u2028b\x85c")


def test_rows_are_read_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"n": n, "pad": "x" * (n % 7)}) + "\n" * (1 + n % 3) for n in range(99))
    )
    rows = open_rows(path, "data.train")
    order = np.random.default_rng(0).permutation(99)
    assert [rows[int(row)]["n"] for row in order] == order.tolist()
