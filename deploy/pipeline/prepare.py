"""Builds what the pipeline begins with: a tokenizer, a small Llama with random weights, and the rows of each step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from deploy.pipeline.dialogues import Pair, answers, is_heldout, read_pairs, shortened

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = 1024
MAX_PROMPT_TOKENS = 64
POSITIONS = 256
HELDOUT_PERCENT = 45
"""Percentage of the pairs that is held out. It is large because there are few pairs: the accuracy of the reward model
then has an error of about three percentage points."""
HELDOUT_PROMPTS = 96
HELDOUT_DEMONSTRATIONS = 256


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer of `VOCABULARY` tokens, trained on the texts."""
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer
    backend.train_from_iterator(
        texts,
        trainer(
            vocab_size=VOCABULARY,
            special_tokens=[PAD, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Returns a float32 Llama of about a million parameters with random weights that `seed` decides."""
    special: Any = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def write_rows(directory: Path, pairs: list[Pair], tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Writes NAME.jsonl for training and held-out rows of all three steps; returns the number of rows by NAME."""

    def count(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    def short(prompt: str) -> str:
        return shortened(prompt, count, MAX_PROMPT_TOKENS)

    rows: dict[str, list[dict[str, str]]] = {}
    for split, chosen in (("heldout", True), ("train", False)):
        mine = [pair for pair in pairs if is_heldout(pair, HELDOUT_PERCENT) == chosen]
        demonstrations = {(short(before), answer) for pair in mine for before, answer in answers(pair)}
        rows[f"sft_{split}"] = [
            {"prompt": prompt, "response": answer} for prompt, answer in sorted(demonstrations) if prompt
        ]
        rows[f"pairs_{split}"] = [
            {"prompt": prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            for pair in mine
            if (prompt := short(pair.prompt))
        ]
        prompts = {row["prompt"]: row for row in rows[f"pairs_{split}"]}
        rows[f"prompts_{split}"] = [{"prompt": prompt} for prompt in prompts]
    rows["sft_heldout"] = rows["sft_heldout"][:HELDOUT_DEMONSTRATIONS]
    rows["prompts_heldout"] = rows["prompts_heldout"][:HELDOUT_PROMPTS]
    for name, table in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {name: len(table) for name, table in rows.items()}


@click.command(context_settings={"show_default": True})
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Pairs of HH-RLHF.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write to.")
@click.option("--seed", default=0, help="Of the weights.")
def main(data: Path, out: Path, seed: int) -> None:
    """Build the tokenizer, model and rows of the pipeline."""
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    pairs = read_pairs(data)
    texts = [pair.prompt + pair.chosen for pair in pairs if not is_heldout(pair, HELDOUT_PERCENT)]
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer, seed)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    sizes = write_rows(out, pairs, tokenizer)
    shown = ", ".join(f"{name} {count}" for name, count in sizes.items())
    click.echo(f"{model.num_parameters() / 1e6:.1f} M parameters; rows: {shown}")


if __name__ == "__main__":
    main()
