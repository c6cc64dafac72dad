"""The work of a stage is that of the model, and rates are measured at the shapes that stages multiply."""

from __future__ import annotations

import pytest

from benchmarks import roofline
from benchmarks.model_flops import layer_weights, training_flops
from benchmarks.roofline import MatmulShape, MatmulWork
from settings.memory.shape import ModelShape

MODEL = ModelShape("llama", 64, hidden=32, intermediate=48, layers=3, heads=4, kv_heads=2, head_dim=8)


def flops(work: list[MatmulWork]) -> float:
    return sum(each.flops for each in work)


@pytest.mark.parametrize("is_critic", [False, True])
def test_an_update_has_the_operations_of_the_training_formula(is_critic: bool):
    rows, prompt, new = 6, 5, 7
    outputs = 0 if is_critic else rows * new
    work = roofline.update_work(MODEL, rows * (prompt + new), rows, prompt + new, outputs, 32)
    assert flops(work) == pytest.approx(training_flops(MODEL, rows, prompt, new, is_critic=is_critic))


def test_a_prompt_that_rows_share_is_read_once():
    rows, prompt, new, group = 8, 5, 7, 4
    apart = roofline.forward_work(MODEL, rows * (prompt + new), rows, prompt + new, 0, 32)
    together = roofline.forward_work(MODEL, rows // group * prompt + rows * new, rows, prompt + new, 0, 32)
    saved = (rows - rows // group) * prompt * 2 * MODEL.layers * layer_weights(MODEL)
    assert flops(apart) - flops(together) == pytest.approx(saved)


def test_generation_has_the_operations_of_a_forward_pass_over_all_but_the_last_token():
    rows, prompt, new = 6, 5, 8
    work = [
        w for w in roofline.generation_work(MODEL, rows, rows, prompt, new) if w.shape.kind != "attention"
    ]
    in_layers = 2 * rows * (prompt + new - 1) * MODEL.layers * layer_weights(MODEL)
    assert flops(work) == pytest.approx(in_layers + 2 * rows * new * MODEL.vocabulary * MODEL.hidden)


def test_seconds_are_operations_over_the_rate_of_their_shape():
    slow, fast = MatmulShape("forward", 1, 2, 3, 4), MatmulShape("forward", 1, 4, 3, 4)
    assert roofline.seconds([MatmulWork(slow, 10.0), MatmulWork(fast, 40.0)], {slow: 5.0, fast: 20.0}) == 4.0


def test_every_kind_of_product_is_measured():
    kinds = ("forward", "input gradient", "weight gradient", "attention")
    shapes = [MatmulShape(kind, 2 if kind == "attention" else 1, 16, 8, 24) for kind in kinds]
    rates = roofline.measure(shapes, 1)
    assert set(rates) == set(shapes)
    assert all(rate > 0 for rate in rates.values())
