"""Rows are cut, padded and put back together without losing or mixing up a value."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.jagged_rows import assemble, first_equal_rows
from services.compute.microbatch import dummy_micro_batch, pad
from services.compute.splitting import cut, split

PAD_ID = 99


def jagged(*rows: list[float]) -> Jagged[Tensor]:
    values = torch.tensor([value for row in rows for value in row])
    return Jagged(values, np.array([len(row) for row in rows], dtype=np.int64))


def tokens(lengths: list[int], first: int) -> Jagged[Tensor]:
    """Rows of the given lengths, every token another number."""
    return Jagged(torch.arange(first, first + sum(lengths)), np.array(lengths, dtype=np.int64))


row_lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), min_size=1, max_size=30)


@given(lengths=st.lists(st.integers(0, 12), max_size=40), budget=st.integers(12, 50))
def test_a_cut_holds_every_row_once_and_pads_no_micro_batch_beyond_the_budget(
    lengths: list[int], budget: int
):
    parts = cut(np.array(lengths, dtype=np.int64), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[row] for row in part) <= budget for part in parts)


@given(lengths=st.lists(st.integers(1, 12), max_size=40), budget=st.integers(12, 50))
def test_packed_micro_batches_are_as_few_as_the_budget_makes_and_filled_alike(
    lengths: list[int], budget: int
):
    parts = cut(np.array(lengths, dtype=np.int64), budget, padded=False)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in part) for part in parts]
    assert all(each <= budget for each in tokens)
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        if filled and filled[-1] + length <= budget:
            filled[-1] += length
        else:
            filled.append(length)
    assert len(tokens) <= len(filled)
    assert all(each <= sum(lengths) // len(filled) + max(lengths) for each in tokens)


def test_no_micro_batch_is_left_over():
    parts = cut(np.full(64, 80), 2048, padded=False)
    assert [len(part) for part in parts] == [22, 22, 20]


def test_rows_of_like_length_go_together_longest_first():
    parts = cut(np.array([2, 9, 2, 8, 2]), token_budget=18)
    assert [part.tolist() for part in parts] == [[1, 3], [0, 2, 4]]


def test_a_cut_may_take_only_some_of_the_rows():
    parts = cut(np.array([5, 100, 5, 5]), token_budget=10, rows=np.array([3, 0]))
    assert [part.tolist() for part in parts] == [[3, 0]]


def test_rows_that_begin_alike_go_together_as_early_as_the_longest_of_them():
    prompts = jagged([1, 2], [3], [1, 2], [3], [4], [1, 2])
    alike = first_equal_rows(prompts, np.arange(6))
    assert alike.tolist() == [0, 1, 0, 1, 4, 0]
    lengths = np.array([4, 6, 5, 2, 5, 3])
    parts = cut(lengths, 8, padded=False, alike=alike)
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 5], [4]]
    assert [part.tolist() for part in cut(lengths, 9, padded=False)] == [[1], [2], [4, 0], [5, 3]]


def test_a_prompt_that_rows_have_in_common_is_computed_once():
    prompts, responses = jagged([1, 2], [3], [1, 2]), jagged([7, 8], [9], [10, 11, 12])
    (micro_batch,) = split(prompts, responses, token_budget=20, pad_id=PAD_ID, packed=True)
    assert micro_batch.rows.tolist() == [2, 0, 1]
    assert micro_batch.input_ids_BT.tolist() == [[1, 2, 10, 11, 7, 3]]
    assert micro_batch.arguments()["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0]]
    assert micro_batch.read_N is not None
    assert micro_batch.read_N.tolist() == [1, 2, 3, 4, 5]
    assert micro_batch.predicting_BR[micro_batch.response_mask_BR].tolist() == [0, 1, 2, 0, 3, 4]
    assert micro_batch.response_ids_N.tolist() == [10, 11, 12, 7, 8, 9]


def test_a_row_beyond_the_budget_is_named():
    with pytest.raises(ValueError, match="row 1 has 11 tokens, more than the token budget of 10"):
        cut(np.array([3, 11, 4]), token_budget=10)


def test_sequences_are_padded_on_the_right_and_responses_point_at_what_predicts_them():
    prompts, responses = jagged([1, 2], [3], [4, 5, 6]), jagged([7, 8, 9], [10], [])
    micro_batch = pad(prompts, responses, np.array([2, 0, 1]), PAD_ID)
    assert micro_batch.input_ids_BT.tolist() == [
        [4, 5, 6, PAD_ID, PAD_ID],
        [1, 2, 7, 8, 9],
        [3, 10, PAD_ID, PAD_ID, PAD_ID],
    ]
    assert micro_batch.response_mask_BR.tolist() == [[False] * 3, [True] * 3, [True, False, False]]
    assert micro_batch.predicting_BR[micro_batch.response_mask_BR].tolist() == [6, 7, 8, 10]
    assert micro_batch.num_scored == 5


@given(lengths=row_lengths, packed=st.booleans())
def test_every_response_token_follows_its_predicting_position_among_those_scored(
    lengths: list[tuple[int, int]], packed: bool
):
    prompts = tokens([prompt for prompt, _ in lengths], first=1000)
    responses = tokens([response for _, response in lengths], first=2000)
    for micro_batch in split(prompts, responses, token_budget=40, pad_id=PAD_ID, packed=packed):
        ids_BT, mask_BR = micro_batch.input_ids_BT, micro_batch.response_mask_BR
        output_BK = ids_BT if micro_batch.read_N is None else ids_BT[:, micro_batch.read_N]
        before = micro_batch.read(output_BK, micro_batch.predicting_BR[mask_BR])
        wholes = [[*prompts.row(row).tolist(), *responses.row(row).tolist()] for row in micro_batch.rows]
        firsts = prompts.lengths[micro_batch.rows]
        assert micro_batch.response_ids_N.tolist() == [
            i for whole, first in zip(wholes, firsts, strict=True) for i in whole[first:]
        ]
        assert before.tolist() == [
            i for whole, first in zip(wholes, firsts, strict=True) for i in whole[first - 1 : -1]
        ]
        scored_BK = output_BK[:, -micro_batch.num_scored :]
        assert micro_batch.read(scored_BK, micro_batch.predicting_BR[mask_BR]).tolist() == before.tolist()
        assert micro_batch.read_N is None or len(micro_batch.read_N) == micro_batch.num_scored
        assert micro_batch.read(output_BK, micro_batch.predicting_BR).shape == mask_BR.shape


@given(lengths=row_lengths)
def test_packed_micro_batches_hold_real_tokens_alone_up_to_the_budget(lengths: list[tuple[int, int]]):
    prompts = tokens([prompt for prompt, _ in lengths], first=1000)
    responses = tokens([response for _, response in lengths], first=2000)
    micro_batches = split(prompts, responses, token_budget=40, pad_id=PAD_ID, packed=True)
    for micro_batch in micro_batches:
        rows = [prompts.row(row).tolist() + responses.row(row).tolist()[:-1] for row in micro_batch.rows]
        assert micro_batch.input_ids_BT.tolist() == [[i for row in rows for i in row]]
        assert micro_batch.input_ids_BT.numel() <= 40
        assert micro_batch.arguments()["position_ids"].tolist() == [
            [i for row in rows for i in range(len(row))]
        ]
    assert sorted(row for each in micro_batches for row in each.rows) == list(range(len(lengths)))


@given(lengths=row_lengths)
def test_a_column_spread_collected_and_assembled_is_the_column(lengths: list[tuple[int, int]]):
    prompts = tokens([prompt for prompt, _ in lengths], first=1)
    responses = tokens([response for _, response in lengths], first=1)
    column = Jagged(torch.randn(len(responses.values)), responses.lengths)
    micro_batches = split(prompts, responses, token_budget=24, pad_id=PAD_ID)
    collected = [micro_batch.collect(micro_batch.spread(column)) for micro_batch in micro_batches]
    whole = assemble([micro_batch.rows for micro_batch in micro_batches], collected, responses.lengths)
    assert torch.equal(whole.values, column.values)
    assert np.array_equal(whole.lengths, column.lengths)


def test_a_spread_column_is_zero_in_the_padding():
    micro_batch = pad(jagged([1], [1]), jagged([5, 6], [7]), np.array([0, 1]), PAD_ID)
    assert micro_batch.spread(jagged([0.5, 0.25], [0.125])).tolist() == [[0.5, 0.25], [0.125, 0.0]]


def test_a_column_of_other_lengths_is_refused():
    micro_batch = pad(jagged([1], [1]), jagged([5, 6], [7]), np.array([0, 1]), PAD_ID)
    with pytest.raises(ValueError, match="row 0 has 1 values for 2 response tokens"):
        micro_batch.spread(jagged([0.5], [0.25, 0.125]))


def test_an_empty_prompt_is_refused_by_row():
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        pad(jagged([1], []), jagged([2], [3]), np.array([0, 1]), PAD_ID)


def test_a_blank_micro_batch_has_nothing_to_collect():
    assert dummy_micro_batch().collect(torch.ones(1, 1)).tolist() == []
