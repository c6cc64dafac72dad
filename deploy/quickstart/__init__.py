"""The quickstart task: a tiny language model that PPO teaches to add numbers below 100.

This module is the half that needs no torch: the sums, the recipe of a build and how to tell a finished one.
`python -m deploy.quickstart.build` makes it.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "quickstart.json"
DATA = ("train.jsonl", "heldout.jsonl", "pairs_train.jsonl", "pairs_heldout.jsonl")
"""Names of the data files of a build."""
OPERANDS = range(1, 100)
NUM_HELDOUT_PAIRS = 256

Row = dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a build, on one kind of machine."""

    seed: int = 0
    """Chooses the held-out sums, the initial weights and the order of the training rows."""
    threads: int = 1
    """CPU threads of the supervised training; floating-point sums, hence the bits, depend on it."""
    target_accuracy: float = 0.25
    """Supervised training stops once this share of its recent rows is answered exactly."""
    max_steps: int = 3000
    """Supervised training stops after this many optimizer steps in any case."""
    batch_size: int = 8
    """Rows of an optimizer step. Small batches at a constant rate keep the weights noisy, so the model answers worse
    than it has understood. PPO learns several times faster from there than from a smoothly trained model of the same
    accuracy."""


TEACHER = Recipe(target_accuracy=0.97, max_steps=4000, batch_size=64)
"""Recipe of the teacher for distillation: the same model, trained until it answers almost all sums."""


def is_complete(directory: Path, recipe: Recipe) -> bool:
    """Whether `directory` holds a finished build of exactly this recipe."""
    manifest = directory / MANIFEST
    is_whole = all((directory / name).is_file() for name in (MANIFEST, *DATA))
    return is_whole and json.loads(manifest.read_text()).get("recipe") == asdict(recipe)


def make_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """Returns a row for each sum of two numbers of `OPERANDS`, as (training rows, held-out rows), shuffled by `seed`.
    The prompt is "17+5=", the ground truth "22".

    A sum is held out in both orders: a training row never gives a held-out answer away.
    """
    generator = random.Random(seed)
    distinct = [(a, b) for a in OPERANDS for b in OPERANDS if a < b]
    held_out = set(generator.sample(distinct, NUM_HELDOUT_PAIRS))
    sums = [(a, b) for a in OPERANDS for b in OPERANDS]
    generator.shuffle(sums)
    train, heldout = [], []
    for a, b in sums:
        row = {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "arithmetic"}
        (heldout if (min(a, b), max(a, b)) in held_out else train).append(row)
    return train, heldout


def make_pairs(rows: list[Row], seed: int) -> list[Row]:
    """Returns a row with a right and a wrong response for each sum of `rows`: "response" and "chosen" are the ground
    truth, "rejected" a number that is at most 20 more or less, drawn by `seed`."""
    generator = random.Random(seed)
    pairs = []
    for row in rows:
        truth = int(row["ground_truth"])
        wrong = generator.choice([n for n in range(max(truth - 20, 0), truth + 21) if n != truth])
        answer = {"response": str(truth), "chosen": str(truth), "rejected": str(wrong)}
        pairs.append({"prompt": row["prompt"], **answer, "data_source": row["data_source"]})
    return pairs
