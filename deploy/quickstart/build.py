"""Build the quickstart task: data, tokenizer and a tiny Llama, briefly trained with supervision.

The model sees a few thousand sums and stops while it still fails most of them, so that PPO has room to teach
it the rest. Held-out sums appear in neither training, not even with their operands swapped.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from deploy.quickstart import (
    DATA,
    MANIFEST,
    TEACHER,
    Recipe,
    Row,
    is_complete,
    make_pairs,
    make_rows,
)

MAX_LENGTH = 64
# The vocabulary is the ASCII table, and its own control characters serve as the special tokens.
PAD, BOS, EOS, UNK = "\x00", "\x02", "\x03", "\x1a"
IGNORED_LABEL = -100

LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
RECENT_STEPS = 80


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a character tokenizer whose token ids are the 128 ASCII code points."""
    backend = Tokenizer(models.BPE(vocab={chr(code): code for code in range(128)}, merges=[], unk_token=UNK))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """Returns a float32 Llama of about 0.3 million parameters with random weights that `seed` decides."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.1,  # a narrow model learns sooner from 0.1 than from the usual 0.02
        pad_token_id=ord(PAD),
        bos_token_id=ord(BOS),
        eos_token_id=ord(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def encode_rows(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and labels, both (rows, longest text). Labels of prompt and padding are `IGNORED_LABEL`.

    Rows are padded on the right, where a causal model needs no attention mask.
    """
    prompts = [tokenizer.encode(row["prompt"]) for row in rows]
    answers = [tokenizer.encode(row["ground_truth"] + EOS) for row in rows]
    texts = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    targets = [
        torch.tensor([IGNORED_LABEL] * len(prompt) + answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    ids = pad_sequence(texts, batch_first=True, padding_value=ord(PAD))
    return ids, pad_sequence(targets, batch_first=True, padding_value=IGNORED_LABEL)


def exact_answers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns whether greedy decoding answers each row exactly, bool (rows,), from logits (rows, width, vocabulary)
    and labels (rows, width) of `encode_rows`.

    Greedy decoding is right if and only if each answer token is the likeliest after the true ones before it.
    """
    predicted, wanted = logits[:, :-1].argmax(-1), labels[:, 1:]
    return ((predicted == wanted) | (wanted == IGNORED_LABEL)).all(-1)


def train(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, recipe: Recipe) -> int:
    """Trains `model` in place until the rows of the last `RECENT_STEPS` batches reach the recipe's target accuracy, or
    for its `max_steps`; returns the number of optimizer steps."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    recent: deque[float] = deque(maxlen=RECENT_STEPS)
    for step in range(1, recipe.max_steps + 1):
        rows = torch.randint(len(ids), (recipe.batch_size,), generator=generator)
        logits = model(input_ids=ids[rows]).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[rows, 1:].flatten(), ignore_index=IGNORED_LABEL
        )
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        recent.append(exact_answers(logits.detach(), labels[rows]).float().mean().item())
        if len(recent) == RECENT_STEPS and sum(recent) >= recipe.target_accuracy * RECENT_STEPS:
            return step
    return recipe.max_steps


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share, from 0 to 1, of rows that greedy decoding answers exactly."""
    return exact_answers(model(input_ids=ids).logits, labels).float().mean().item()


def write_build(directory: Path, recipe: Recipe) -> None:
    """Trains the model and writes a whole build into the existing `directory`: the files of `DATA`, model/ with the
    tokenizer, and last the manifest."""
    started = time.monotonic()
    tokenizer, model = make_tokenizer(), make_model(recipe.seed)
    train_rows, heldout_rows = make_rows(recipe.seed)
    pairs = [make_pairs(rows, recipe.seed) for rows in (train_rows, heldout_rows)]
    for name, rows in zip(DATA, (train_rows, heldout_rows, *pairs), strict=True):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    num_steps = train(model, *encode_rows(tokenizer, train_rows), recipe)
    score = accuracy(model, *encode_rows(tokenizer, heldout_rows))
    manifest = {
        "recipe": asdict(recipe),
        "num_parameters": model.num_parameters(),
        "supervised_steps": num_steps,
        "accuracy": score,
    }
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    click.echo(
        f"{num_steps} supervised steps, {time.monotonic() - started:.0f} s, held-out accuracy {score:.1%}"
    )


def build(out: Path, recipe: Recipe) -> None:
    """Make `out` hold a build of `recipe`; a finished one is left alone, one of another recipe is replaced.

    The work happens in a directory beside `out` that takes its name at the end: `out` is never half a build.

    Raises:
        click.ClickException: `out` exists and is not a build, so it is not ours to replace.
    """
    if is_complete(out, recipe):
        click.echo(f"{out} is up to date")
        return
    if out.exists() and not (out / MANIFEST).is_file():
        raise click.ClickException(f"{out} exists and is not a quickstart build")
    out.parent.mkdir(parents=True, exist_ok=True)
    click.echo(f"building the quickstart task in {out}")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(recipe.threads)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            staging = Path(temporary) / "build"
            staging.mkdir()
            write_build(staging, recipe)
            if out.exists():
                shutil.rmtree(out)
            staging.rename(out)
    finally:
        torch.set_num_threads(num_threads)


@click.command(context_settings={"show_default": True})
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Directory of the model and the data."
)
@click.option("--seed", default=Recipe.seed, help="Seed of the held-out sums and the training.")
@click.option("--threads", default=Recipe.threads, help="CPU threads, on which the bits depend.")
@click.option("--target-accuracy", default=Recipe.target_accuracy, help="Share of right answers to stop at.")
@click.option("--max-steps", default=Recipe.max_steps, help="Most optimizer steps.")
@click.option("--teacher", is_flag=True, help="Also build a teacher for distillation, in OUT/teacher.")
def main(
    out: Path, seed: int, threads: int, target_accuracy: float, max_steps: int, *, teacher: bool
) -> None:
    """Build the data, tokenizer and supervised model of the quickstart task."""
    # Ends as after Ctrl-C, so that nothing half done stays.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    logging.disable_progress_bar()
    # Where DeepSpeed is installed, transformers imports it to save a model; without this it warns that it sees no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    build(out, Recipe(seed, threads, target_accuracy, max_steps))
    if teacher:
        build(out / "teacher", replace(TEACHER, seed=seed, threads=threads))


if __name__ == "__main__":
    main()
