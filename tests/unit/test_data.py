"""Which prompts a step trains on is a function of seed and step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.data.loader import shuffled
from controller.data.prompt_form import PromptForm
from controller.data.prompt_source import PromptSource
from controller.data.prompts import PromptData, TextData
from rlhf.errors import ConfigError


class Listed(list[dict[str, Any]]):
    """Rows that are held in memory."""

    fills_nulls = False

    def where(self, row: int) -> str:
        return f"row {row}"

    def fingerprint(self) -> str:
        return ""


def data_of(count: int) -> PromptData:
    return PromptData([PromptSource(Listed({"prompt": f"p{i}"} for i in range(count)), PromptForm())])


def rows_of_step(data: PromptData, step: int, count: int, seed: int) -> np.ndarray:
    """Numbers of the rows that a `Loader` draws for a step, from 1, where it leaves out none."""
    return shuffled(np.arange((step - 1) * count, step * count), len(data), f"data/{seed}")


def test_every_pass_visits_every_row_once_in_an_order_of_its_own() -> None:
    data = data_of(10)
    passes = [np.concatenate([rows_of_step(data, s, 5, 0) for s in steps]) for steps in ((1, 2), (3, 4))]
    for rows in passes:
        assert sorted(rows.tolist()) == list(range(10))
    assert passes[0].tolist() != passes[1].tolist()


def test_a_step_across_the_end_of_a_pass_goes_on_with_the_next() -> None:
    data = data_of(4)
    rows = np.concatenate([rows_of_step(data, step, 3, 7) for step in range(1, 5)])
    assert [sorted(part.tolist()) for part in np.split(rows, 3)] == [[0, 1, 2, 3]] * 3


def test_a_step_can_be_asked_for_without_those_before_it() -> None:
    data = data_of(50)
    assert rows_of_step(data, 9, 8, 3).tolist() == rows_of_step(data_of(50), 9, 8, 3).tolist()
    assert rows_of_step(data, 9, 8, 3).tolist() != rows_of_step(data, 9, 8, 4).tolist()


def test_further_fields_are_metadata(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "ground_truth": 2, "level": {"hard": false}}\n\n')
    data = PromptData.load(path, "data.train")
    (prompt,) = [data[row] for row in range(len(data))]
    assert (prompt.text, prompt.ground_truth) == ("1+1=", "2")
    assert json.loads(prompt.metadata) == {"level": {"hard": False}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no rows"),
        (
            '{"prompt": "a"}\n{"question": "b"}',
            r'rows\.jsonl:2: no field prompt, only: question; .* name it: columns\.prompt = "FIELD"',
        ),
        ("[1]", "rows.jsonl:1: not a JSON object"),
        ('{"prompt": ""}', "prompt is not a text, or empty"),
        ("nonsense", "rows.jsonl:1"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        PromptData.load(path, "data.train")


def test_a_missing_file_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.heldout: .*gone\.jsonl: No such file"):
        PromptData.load(tmp_path / "gone.jsonl", "data.heldout")


def test_texts_are_read_by_row(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f"{json.dumps({'text': text, 'more': 1})}\n" for text in "abcde"))
    data = TextData.load(path, "data.pretrain")
    assert [data[row] for row in range(len(data))] == list("abcde")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', "no field text, only: prompt$"),
        ('{"text": 3}', "text is not a text, or empty: 3"),
        ("[]", "with a text"),
    ],
)
def test_a_row_without_a_text_is_told_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"data\.pretrain: .*texts\.jsonl:2: .*{message}"):
        TextData.load(path, "data.pretrain")
