"""One engine of `benchmarks.generate`, in a process of its own, which answers each turn with seconds and tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import AutoModelForCausalLM

from benchmarks.turns import Turns
from services.models.families import load_causal_lm
from services.rollout.base import RolloutEngine, SamplingOptions
from services.rollout.hf import HFRollout
from services.rollout.sampling import row_seeds
from settings.engines import VllmTable

KV_CACHE_GB = 1.0

Prompts = list[list[int]]
Generate = Callable[[], int]
"""Generates once; returns the number of new tokens."""


def hf(model: Path, prompts: Prompts, num_new: int) -> Generate:
    """The rollout engine hf."""
    budget = sum(map(len, prompts)) + len(prompts) * num_new
    return _rollout(HFRollout(load_causal_lm(model), token_budget=budget), prompts, num_new)


def vllm(model: Path, prompts: Prompts, num_new: int) -> Generate:
    """The rollout engine vllm."""
    # Seconds of import, and not installed everywhere.
    from services.rollout.vllm import VLLMRollout

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    table = VllmTable(kv_cache_gb=KV_CACHE_GB, max_num_seqs=len(prompts))
    engine = VLLMRollout(model, dtype=torch.float32, table=table, identity=f"rlhf-benchmark-{os.getpid()}")
    return _rollout(engine, prompts, num_new)


def plain_transformers(model: Path, prompts: Prompts, num_new: int) -> Generate:
    """`generate` of transformers, without log-probabilities."""
    generator: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    ids_BT = torch.tensor(prompts)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": num_new}

    @torch.inference_mode()
    def run() -> int:
        output_BT = generator.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), **options)
        return output_BT[:, ids_BT.shape[1] :].numel()

    return run


def plain_vllm(model: Path, prompts: Prompts, num_new: int) -> Generate:
    """`vllm.LLM` in one process, with the log-probability of each token but without seeds per row."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1"
    )
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=len(prompts),
        kv_cache_memory_bytes=int(KV_CACHE_GB * (1 << 30)),
    )
    parameters = SamplingParams(max_tokens=num_new, ignore_eos=True, logprobs=0, detokenize=False)
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]

    def run() -> int:
        # Or a turn would find its prompts in the cache.
        engine.reset_prefix_cache()
        outputs = engine.generate(inputs, parameters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


ENGINES: dict[str, Callable[[Path, Prompts, int], Generate]] = {
    "hf": hf,
    "vllm": vllm,
    "plain transformers.generate": plain_transformers,
    "plain vllm.LLM": plain_vllm,
}


def make_prompts(num_rows: int, num_tokens: int, vocabulary: int) -> Prompts:
    """Random prompts, all different."""
    drawn = np.random.default_rng(0).integers(3, vocabulary, (num_rows, num_tokens))
    return drawn.tolist()


def _rollout(engine: RolloutEngine, prompts: Prompts, num_new: int) -> Generate:
    seeds = row_seeds(0, 0, "benchmark", np.arange(len(prompts)))
    options = SamplingOptions(max_new_tokens=num_new)
    return lambda: len(engine.generate(prompts, options, seeds).responses.values)


@click.command()
@click.option("--engine", type=click.Choice(list(ENGINES)), required=True)
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--rows", type=int, required=True)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--new-tokens", type=int, required=True)
@click.option("--threads", type=int, required=True)
def main(engine: str, model: Path, rows: int, prompt_tokens: int, new_tokens: int, threads: int) -> None:
    """Generate once for each line on standard input, after once to warm up."""
    turns = Turns()
    torch.set_num_threads(threads)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    generate = ENGINES[engine](model, make_prompts(rows, prompt_tokens, vocabulary), new_tokens)
    generate()
    turns.answer("ready")
    while turns.wait():
        started = time.perf_counter()
        tokens = generate()
        turns.answer([time.perf_counter() - started, tokens])
    # vLLM's own end complains of a process group that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
