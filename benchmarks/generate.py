"""Tokens per second of the rollout engines, beside the plain engines that they use.

All generate as many tokens for the same prompts with the same small Llama, each in a process of its own with as many
threads, in turns, so that drift of the machine hits all alike.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import tempfile
from pathlib import Path

import click
import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.generate_engines import ENGINES
from benchmarks.report import circumstances, console, json_option, write_json
from benchmarks.turns import Player
from settings.memory.shape import ModelShape

ANCHORS = {"hf": "plain transformers.generate", "vllm": "plain vllm.LLM"}
LEAST_OF_PLAIN = 0.95


SHAPE = ModelShape("llama", 1024, hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4, head_dim=32)


def build_model(directory: Path) -> int:
    """Writes a Llama of about 3 million random weights; returns the exact number."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SHAPE.vocabulary,
            hidden_size=SHAPE.hidden,
            intermediate_size=SHAPE.intermediate,
            num_hidden_layers=SHAPE.layers,
            num_attention_heads=SHAPE.heads,
            num_key_value_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim,
            max_position_embeddings=1024,
            eos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    return model.num_parameters()


def of_plain(rates: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Tokens/s over those of the plain engine: the median over the turns, the least and the most."""
    ratios = [ours / plain for ours, plain in zip(rates[name], rates[ANCHORS[name]], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def show(rates: dict[str, list[float]]) -> None:
    """The table."""
    table = Table(title="Generation, tokens per second")
    for name in ("engine", "median", "turns", "of plain (turns)"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for name, turns in rates.items():
        against = "{:.3f} ({:.3f} to {:.3f})".format(*of_plain(rates, name)) if name in ANCHORS else ""
        table.add_row(
            name, f"{statistics.median(turns):,.0f}", f"{min(turns):,.0f} to {max(turns):,.0f}", against
        )
    screen = console()
    screen.print(table)
    for name in filter(ANCHORS.__contains__, rates):
        ratio = of_plain(rates, name)[0]
        verdict = "met" if ratio >= LEAST_OF_PLAIN else "missed"
        screen.print(
            f"{name} over {ANCHORS[name]}: {ratio:.3f}, aim at least {LEAST_OF_PLAIN:.2f}: {verdict}"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rows", default=128, show_default=True, type=click.IntRange(1), help="Rows of a turn.")
@click.option("--prompt-tokens", default=16, show_default=True, type=click.IntRange(1))
@click.option("--new-tokens", default=64, show_default=True, type=click.IntRange(1), help="Of each row.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Of each engine.")
@click.option("--turns", default=8, show_default=True, type=click.IntRange(1), help="Of each engine.")
@json_option
def main(
    rows: int, prompt_tokens: int, new_tokens: int, threads: int, turns: int, json_path: Path | None
) -> None:
    """Time the rollout engines beside transformers.generate and vllm.LLM."""
    before = circumstances()
    names = [name for name in ENGINES if "vllm" not in name or importlib.util.find_spec("vllm")]
    if len(names) < len(ENGINES):
        click.echo("vLLM is not installed (make setup-vllm): its engines are left out", err=True)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch)
        num_parameters = build_model(directory / "model")
        sizes = {"--rows": rows, "--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens}
        command = ["-m", "benchmarks.generate_engines"]
        arguments = ["--model", str(directory / "model"), "--threads", str(threads)]
        arguments += [str(part) for option in sizes.items() for part in option]
        engines = [
            stack.enter_context(
                Player(name, [*command, "--engine", name, *arguments], threads, directory / f"{number}.log")
            )
            for number, name in enumerate(names)
        ]
        for engine in engines:
            engine.wait_until_ready()
        rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(turns):
            for engine in engines:
                seconds, tokens = engine.turn()
                rates[engine.name].append(tokens / seconds)
    show(rates)
    figures = {
        "before": before,
        "after": circumstances(),
        "parameters": num_parameters,
        "threads": threads,
        "sizes": {"rows": rows, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
        "tokens_per_s": rates,
        "of_plain": {name: of_plain(rates, name) for name in filter(ANCHORS.__contains__, rates)},
    }
    write_json(json_path, figures)


if __name__ == "__main__":
    main()
