"""Ranks that shard every weight (FSDP2) compute what one process with plain transformers does."""

import pytest

from integration.ranks import launch
from integration.references import STEPS_TOLERANCE, TOLERANCE, References

DEADLINE_S = 240
FAST = ("llama-float64", "qwen2-float64", "qwen2-float32", "qwen3_moe-float32")
OTHERS = ("gemma2-float32", "gpt_oss-float32", "deepseek_v3-float32")
"""Capped scores and logits, attention sinks, values of fewer numbers than keys."""
EVERY = (*FAST, *OTHERS, "llama-float32", "llama-value")
DIVIDED = ("qwen2-float64", "qwen3_moe-float32", "llama-value")
WINDOWS = ("qwen3-float64", "mistral-float64")
"""Models with sliding windows."""
LAUNCHES = [
    pytest.param((2, 1, FAST), id="2 ranks"),
    pytest.param((4, 2, DIVIDED), id="2 data ranks of 2"),
    pytest.param((2, 1, EVERY), id="2 ranks, everything", marks=pytest.mark.full),
    pytest.param(
        (4, 2, (*DIVIDED, "qwen3-float64", *OTHERS)),
        id="2 data ranks of 2, everything",
        marks=pytest.mark.full,
    ),
    pytest.param((4, 1, EVERY), id="4 ranks, everything", marks=pytest.mark.full),
    pytest.param((8, 8, (*EVERY, *WINDOWS)), id="1 data rank of 8, everything", marks=pytest.mark.full),
]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=LAUNCHES)
def reports(request: pytest.FixtureRequest, references: References) -> list[dict[str, dict]]:
    """Of each rank, by case."""
    num_ranks, sequence_parallel, chosen = request.param
    cases = {name: references[name] for name in chosen}
    return launch("integration.fsdp_main", num_ranks, cases, sequence_parallel, deadline_s=DEADLINE_S)


def beyond(tolerance: dict[str, float], reports: list[dict[str, dict]], *keys: str) -> dict[str, float]:
    """Distances from the reference above tolerance, by name."""
    return {
        f"{case}, rank {rank}: {key}": report[key]
        for rank, cases in enumerate(reports)
        for case, report in cases.items()
        for key in keys
        if key in report and not report[key] <= tolerance.get(case.split("-")[1], 1e-8)
    }


def test_the_ranks_have_different_numbers_of_micro_batches(reports: list[dict[str, dict]]):
    counts = [rank["qwen2-float64"]["num_micro_batches"] for rank in reports]
    _, data_ranks = reports[0]["qwen2-float64"]["data"]
    assert (counts[0] > counts[-1]) == (data_ranks > 1)


def test_log_probs_are_those_of_rows_computed_alone(reports: list[dict[str, dict]]):
    tolerance = {dtype: 10 * bound for dtype, bound in TOLERANCE.items()}
    assert beyond(tolerance, reports, "log_probs") == {}


def test_loss_and_every_gradient_are_those_of_one_process(reports: list[dict[str, dict]]):
    assert beyond(TOLERANCE, reports, "loss", "gradients") == {}


def test_packed_rows_that_share_all_they_read_have_the_numbers_of_padded_ones(reports: list[dict[str, dict]]):
    assert beyond({"float64": 1e-5}, reports, "packed") == {}


def test_three_steps_are_those_of_one_process(reports: list[dict[str, dict]]):
    assert beyond(STEPS_TOLERANCE, reports, "norms", "losses", "weights") == {}
