"""TRL in `benchmarks.end_to_end`: its GRPO or PPO trainer in one process, iterating in its turns.

The settings are those of the cluster; what TRL has on by default and costs it time without need here is off: gradient
checkpointing, and bfloat16, which is slower than float32 on most CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from benchmarks import end_to_end_task as task
from benchmarks.end_to_end_task import Sizes, Stopwatch, even_words, num_steps, read_prompts
from benchmarks.turns import Turns


class Laps(TrainerCallback):
    """Reports each update to a stopwatch."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def on_step_end(self, *arguments: Any, **more: Any) -> None:
        self._stopwatch.lap()


class EvenTokens(nn.Module):
    """The reward function as a reward model, the only form that PPO of TRL takes."""

    base_model_prefix = "backbone"

    def __init__(self, prompt_tokens: int) -> None:
        super().__init__()
        self._prompt_tokens = prompt_tokens

    def backbone(self, input_ids: Tensor, **more: Any) -> SimpleNamespace:
        is_even_BT = (input_ids % 2 == 0).float()
        share_B1 = is_even_BT[:, self._prompt_tokens :].mean(dim=1, keepdim=True)
        return SimpleNamespace(hidden_states=[share_B1.expand(-1, input_ids.shape[1])[..., None]])

    def score(self, hidden_BT1: Tensor) -> Tensor:
        return hidden_BT1


def grpo(model: Path, prompts: Sequence[str], sizes: Sizes, common: dict[str, Any], laps: Laps) -> None:
    """GRPO without KL."""
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    def reward(prompts: list[str], completions: list[str], **more: Any) -> list[float]:
        return [even_words(*row, "", {}) for row in zip(prompts, completions, strict=True)]

    options = GRPOConfig(
        **common,
        num_generations=task.GROUP,
        max_completion_length=sizes.new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=task.CLIP,
        loss_type="grpo",
        max_grad_norm=task.MAX_GRAD_NORM,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=options,
        train_dataset=_dataset({"prompt": list(prompts)}),
        processing_class=_tokenizer(model),
        callbacks=[laps],
    )
    trainer.train()


def ppo(model: Path, prompts: Sequence[str], sizes: Sizes, common: dict[str, Any], laps: Laps) -> None:
    """PPO with a value model of its own."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # type: ignore[import-not-found]

    tokenizer = _tokenizer(model)
    options = PPOConfig(
        **common,
        total_episodes=sizes.rows * common["max_steps"],
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=common["per_device_train_batch_size"],
        num_sample_generations=0,
        response_length=sizes.new_tokens,
        temperature=1.0,
        kl_coef=task.KL_COEFFICIENT,
        cliprange=task.CLIP,
        cliprange_value=task.VALUE_CLIP,
        vf_coef=task.VALUE_COEFFICIENT,
        lam=task.LAMBDA,
    )
    trainer = PPOTrainer(
        args=options,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(model),
        ref_model=AutoModelForCausalLM.from_pretrained(model),
        reward_model=EvenTokens(sizes.prompt_tokens),
        value_model=AutoModelForSequenceClassification.from_pretrained(model, num_labels=1),
        train_dataset=_dataset({"input_ids": tokenizer(list(prompts))["input_ids"]}),
        callbacks=[laps],
    )
    trainer.train()


def _tokenizer(model: Path) -> Any:
    """With the special tokens that TRL asks for. The model has no such tokens, so that no response ends before its
    time."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": "</s>", "pad_token": "<pad>"})
    return tokenizer


def _dataset(columns: dict[str, Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


TRAINERS = {"grpo": grpo, "ppo": ppo}


@click.command()
@click.option("--algorithm", type=click.Choice(list(TRAINERS)), required=True)
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--scratch", type=click.Path(path_type=Path), required=True)
@click.option("--rows", type=int, required=True)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--new-tokens", type=int, required=True)
@click.option("--micro-rows", type=int, required=True)
@click.option("--threads", type=int, required=True)
@click.option("--warm-up", type=int, required=True)
@click.option("--iterations", type=int, required=True)
def main(
    algorithm: str,
    model: Path,
    prompts: Path,
    scratch: Path,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    micro_rows: int,
    threads: int,
    warm_up: int,
    iterations: int,
) -> None:
    """Iterate on request, and report the time."""
    laps = Laps(Stopwatch(Turns(), warm_up, iterations))
    torch.set_num_threads(threads)
    common: dict[str, Any] = {
        "output_dir": str(scratch),
        "max_steps": num_steps(warm_up, iterations),
        "per_device_train_batch_size": micro_rows,
        "gradient_accumulation_steps": rows // micro_rows,
        "learning_rate": task.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    TRAINERS[algorithm](model, read_prompts(prompts), Sizes(rows, prompt_tokens, new_tokens), common, laps)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
