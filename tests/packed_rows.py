"""Rows of a micro-batch in any shape and order, and the distance between the numbers of packed and of padded ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nccl_transfer.refs.columns import Jagged
from services.compute.heads import PolicyHead, PolicyOutput
from services.compute.microbatch import MicroBatch, pack, pad
from services.compute.packing import TILE

VOCABULARY = 61
HEAD = PolicyHead(temperature=0.7)


@dataclass(frozen=True)
class RowShapes:
    """Rows that may share prompts.

    Attributes:
        prompts: number of each row's prompt.
        prompt_lengths: tokens of each prompt, at least 1.
        response_lengths: tokens of each row's response.
    """

    prompts: list[int]
    prompt_lengths: list[int]
    response_lengths: list[int]

    def columns(self) -> tuple[Jagged[Tensor], Jagged[Tensor]]:
        """Prompts and responses of random tokens."""
        generator = np.random.default_rng(1)
        prompts = [generator.integers(0, VOCABULARY, length) for length in self.prompt_lengths]
        responses = [generator.integers(0, VOCABULARY, length) for length in self.response_lengths]
        return jagged([prompts[number] for number in self.prompts]), jagged(responses)


FEW = [
    RowShapes([0, 0], [11], [12, 1]),
    RowShapes([0, 0, 0], [1], [1, 1, 1]),
    RowShapes([0, 1, 0, 1], [5, 9], [4, 0, 0, 1]),
    RowShapes([0, 1, 2], [3, 1, 2], [1, 7, 0]),
]
"""One that begins where the row ends, for each reason there is; and rows that share nothing."""


@st.composite
def row_shapes(draw: st.DrawFn) -> RowShapes:
    """Up to six rows with up to three prompts among them. Short rows are likely, and that all share a prompt."""
    lengths = st.one_of(st.integers(0, 2), st.integers(3, 2 * TILE))
    num_rows, num_prompts = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return RowShapes(
        draw(st.lists(st.integers(0, num_prompts - 1), min_size=num_rows, max_size=num_rows)),
        draw(st.lists(lengths.map(lambda n: n + 1), min_size=num_prompts, max_size=num_prompts)),
        draw(st.lists(lengths, min_size=num_rows, max_size=num_rows)),
    )


def jagged(rows: list[np.ndarray]) -> Jagged[Tensor]:
    return Jagged(torch.from_numpy(np.concatenate(rows)), np.array([len(row) for row in rows]))


def loss(output: PolicyOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return output.log_probs_BR[micro_batch.response_mask_BR].square().sum(), {}


def packed_distance(engine: Any, shapes: RowShapes) -> float:
    """The norm of the difference between packed and padded rows over that of padded ones: the largest of
    log-probabilities and the gradients of this rank's weights. Collective; every data rank computes all rows."""
    prompts, responses = shapes.columns()
    every = np.arange(len(shapes.prompts))
    padded = _numbers(engine, pad(prompts, responses, every, 0))
    packed = _numbers(engine, pack(prompts, responses, every))
    assert padded.keys() == packed.keys()
    norm = torch.linalg.vector_norm
    # A gradient that is zero, as that of queries where there is one token to attend to, has rounding errors alone.
    return max(float(norm(packed[name] - x) / (norm(x) + 1e-7)) for name, x in padded.items())


def _numbers(engine: Any, micro_batch: MicroBatch) -> dict[str, Tensor]:
    outputs = engine.infer([micro_batch], HEAD)
    engine._accumulate_gradients([micro_batch], HEAD, loss)
    gradients = {name: x.grad.clone() for name, x in engine._kept.items()}
    engine._drop_gradients()
    return {
        f"log_probs of {n}": micro_batch.collect(x.log_probs_BR) for n, x in enumerate(outputs)
    } | gradients
