"""Attention with capped scores and with sinks: the numbers of its formula, whole and in chunks of queries."""

import itertools

import pytest
import torch
from torch import Tensor

from services.compute import explicit_attention
from services.compute.explicit_attention import Scores

SCALING = 0.3
HEADS, KEY_HEADS, QUERIES, KEYS = 4, 2, 7, 9


def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of two rows, and logits of sinks."""
    torch.manual_seed(1)
    shapes = (2, HEADS, QUERIES, 8), (2, KEY_HEADS, KEYS, 8), (2, KEY_HEADS, KEYS, 6), (HEADS,)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def expected_of(operands: tuple[Tensor, ...], cap: float | None, has_sinks: bool, seen: Tensor) -> Tensor:
    """Output by output, from the formula; `seen` [T, S] says which keys a query reads."""
    query, key, value, sinks = operands
    outputs = torch.empty((2, QUERIES, HEADS, value.shape[-1]), dtype=torch.float64)
    for row, token, head in itertools.product(range(2), range(QUERIES), range(HEADS)):
        scores = SCALING * (key[row, head // 2, seen[token]] @ query[row, head, token])
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        weights = scores.exp()
        total = weights.sum() + (sinks[head].exp() if has_sinks else 0)
        outputs[row, token, head] = (weights / total) @ value[row, head // 2, seen[token]]
    return outputs


@pytest.mark.parametrize(
    "most_scores", [1 << 25, 2 * HEADS * KEYS * 3, 1], ids=["whole", "3 queries", "1 query"]
)
@pytest.mark.parametrize("is_windowed", [False, True])
@pytest.mark.parametrize(("cap", "has_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_outputs_and_gradients_are_those_of_the_formula(
    cap: float | None,
    has_sinks: bool,
    is_windowed: bool,
    most_scores: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(explicit_attention, "MOST_SCORES", most_scores)
    operands = make()
    query, key, value, sinks = operands
    seen = torch.ones((QUERIES, KEYS), dtype=torch.bool).tril(KEYS - QUERIES)
    seen = seen.triu(KEYS - QUERIES - 2) if is_windowed else seen
    scores = Scores(cap, sinks if has_sinks else None)
    found = scores.attend(query, key, value, seen[None, None] if is_windowed else None, SCALING)
    expected = expected_of(operands, cap, has_sinks, seen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    used = operands if has_sinks else operands[:3]
    of_found, of_expected = (torch.autograd.grad(x.square().sum(), used) for x in (found, expected))
    torch.testing.assert_close(of_found, of_expected, rtol=1e-10, atol=1e-12)


def test_scores_of_some_heads_have_the_sinks_of_these():
    sinks = torch.arange(4.0)
    chosen = Scores(2.0, sinks).of_heads(slice(2, 4)).sinks_H
    assert chosen is not None
    assert chosen.tolist() == [2.0, 3.0]
    assert Scores(2.0).of_heads(slice(2, 4)).sinks_H is None


def test_a_query_in_the_padding_has_an_output():
    query, key, value, _ = make()
    nothing = torch.zeros((1, 1, QUERIES, KEYS), dtype=torch.bool)
    assert Scores(1.5).attend(query, key, value, nothing, SCALING).isfinite().all()
