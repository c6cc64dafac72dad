"""The figures of docs/memory.md are those that the predictor gives."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper_setup import LLAMA_SHAPES
from settings.memory.predict import predict
from settings.memory.use import ModelUse, RolloutUse, RowSizes

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
HEADING = "| model | ranks | engine | idle | generation | update | host in an update |"
ROWS = RowSizes(prompt_tokens=1024, response_tokens=1024, rows=1024, mini_batches=8)
GB = 1e9


def actor(
    size: str, engine: str, mesh: tuple[int, int, int], generation: int, shards: bool = False
) -> ModelUse:
    """An actor in bfloat16 that recomputes activations; with engine 3d it generates on `generation` tensor ranks."""
    return ModelUse(
        LLAMA_SHAPES[size],
        engine=engine,  # pyright: ignore[reportArgumentType]
        mesh=mesh,
        shards_over_data=shards,
        zero_stage=3,
        dtype="bfloat16",
        activation_checkpointing=engine != "zero",
        rollout=RolloutUse(tensor=generation, cache_tokens=131072),
    )


def line(
    size: str, engine: str, mesh: tuple[int, int, int], generation: int = 1, shards: bool = False
) -> str:
    use = actor(size, engine, mesh, generation, shards)
    stages = predict(use, ROWS)
    text = {
        "3d": f"`3d` {'-'.join(map(str, mesh))}, generation tensor size {generation}",
        "zero": "`zero` stage 3",
    }
    name = text.get(engine, f"`{engine}`") + (", sharded over data" if shards else "")
    figures = [stages[stage].device_bytes for stage in ("idle", "generation", "update")]
    figures.append(stages["update"].host_bytes)
    return f"| {size} | {use.ranks} | {name} | {' | '.join(f'{nbytes / GB:.1f}' for nbytes in figures)} |"


def table() -> list[str]:
    return [
        line("7B", "fsdp", (1, 1, 8)),
        line("7B", "zero", (1, 1, 8)),
        line("7B", "3d", (1, 8, 1), 2),
        line("13B", "fsdp", (1, 1, 16)),
        line("13B", "3d", (1, 8, 2), 4),
        line("34B", "fsdp", (1, 1, 32)),
        line("34B", "3d", (4, 8, 1), 8),
        line("34B", "3d", (1, 8, 4), 8, True),
        line("70B", "fsdp", (1, 1, 64)),
        line("70B", "3d", (8, 8, 1), 8),
        line("70B", "3d", (1, 8, 8), 8, True),
    ]


def test_the_figures_of_the_page_are_predicted() -> None:
    lines = PAGE.read_text().splitlines()
    begin = lines.index(HEADING) + 2
    predicted = table()
    assert lines[begin : begin + len(predicted)] == predicted, "\n".join(
        ["the page should have:", *predicted]
    )
