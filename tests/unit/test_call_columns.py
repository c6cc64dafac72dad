"""Columns of a call's rows as tensors: those that cannot be what a method needs are bad input."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.rows import FetchedRows
from rlhf.errors import InvalidRequest
from services.roles.columns import jagged_column, sequence_columns, token_column
from services.runtime.worker import CallRows

LENGTHS = np.asarray([2, 1])


def call_rows(**columns: np.ndarray | Jagged[np.ndarray]) -> CallRows:
    return CallRows(FetchedRows(2, columns, dict.fromkeys(columns, "float32"), 0), np.arange(2))


def test_elements_of_a_jagged_column_are_single_numbers() -> None:
    rows = call_rows(
        prompt_ids=Jagged(np.zeros((3, 1), np.float32), LENGTHS),
        response_ids=Jagged(np.zeros(3, np.float32), LENGTHS),
        advantages=Jagged(np.zeros((3, 2), np.float32), LENGTHS),
    )
    for read in (lambda: jagged_column(rows, "prompt_ids"), lambda: sequence_columns(rows)):
        with pytest.raises(InvalidRequest, match=r"'prompt_ids' has elements of shape \[1\]; one number"):
            read()
    with pytest.raises(InvalidRequest, match=r"'advantages' has elements of shape \[2\]"):
        token_column(rows, "advantages")


def test_a_number_for_each_row_is_that_of_all_its_tokens() -> None:
    responses = Jagged(np.zeros(3, np.float32), LENGTHS)
    rows = call_rows(response_ids=responses, advantages=np.asarray([0.5, 2.0], np.float32))
    assert token_column(rows, "advantages").values.tolist() == [0.5, 0.5, 2.0]
    with pytest.raises(InvalidRequest, match="one number is allowed"):
        token_column(call_rows(response_ids=responses, a=np.zeros((2, 1), np.float32)), "a")


def test_a_column_that_is_not_jagged_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'prompt_ids' is not jagged"):
        jagged_column(call_rows(prompt_ids=np.zeros(2, np.float32)), "prompt_ids")
