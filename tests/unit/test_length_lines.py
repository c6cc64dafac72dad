"""Warnings at the start of a run about responses that are longer than it trains on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from controller.config.config import Config
from controller.data.length_lines import responses_cut
from controller.data.prompts import load_data
from deploy.quickstart.build import BOS, make_tokenizer


@pytest.fixture(params=[False, True], ids=["plain", "with a token at the start"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    tokenizer = make_tokenizer()
    if request.param:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def line(tmp_path: Path, rows: list[dict[str, Any]], columns: tuple[str, ...], most: int, **data: Any) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", **row}) + "\n" for row in rows))
    config = Config.model_validate(
        {
            "data": {"train": path, "heldout": path, **data},
            "rollout": {"max_response_tokens": most},
            "services": {"reward": {"role": "reward", "address": "127.0.0.1:7104", "function": "length"}},
        }
    )
    return responses_cut(config, load_data(config, columns), columns)


def test_responses_that_are_cut_are_counted(tmp_path: Path, model: Path) -> None:
    """The tokenizer has a token for each character; the end of a response is one more."""
    rows = [{"response": "1" * length} for length in (1, 3, 4, 9)]
    assert line(tmp_path, rows, ("response",), 4, tokenizer=model) == (
        "responses are cut to rollout.max_response_tokens, 4: 2 of 4 training rows looked at, 2 of 4 held-out ones; "
        "the longest has 10 tokens, its end included. Raise rollout.max_response_tokens to train on all of them"
    )
    assert line(tmp_path, rows, ("response",), 10, tokenizer=model) == ""


def test_a_pair_counts_once(tmp_path: Path, model: Path) -> None:
    pairs = [("1", "12345"), ("12345", "1"), ("12345", "12345"), ("1", "1")]
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    found = line(tmp_path, rows, ("chosen", "rejected"), 4, tokenizer=model)
    assert "3 of 4 training rows looked at" in found


def test_nothing_is_said_where_there_are_no_responses_or_they_cannot_be_counted(tmp_path: Path) -> None:
    rows = [{"response": "1" * 99}]
    assert line(tmp_path, rows, ("response",), 4) == ""
    assert line(tmp_path, rows, (), 4, tokenizer=tmp_path) == ""
