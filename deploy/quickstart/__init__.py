"""The quickstart task: a tiny language model that PPO teaches to add numbers below 100.

This module is the torch-free half: what a build is made of and how to tell a finished one.
`python -m deploy.quickstart.build` makes it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "quickstart.json"


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


def is_complete(directory: Path, recipe: Recipe) -> bool:
    """Whether `directory` holds a finished build of exactly this recipe."""
    manifest = directory / MANIFEST
    return manifest.is_file() and json.loads(manifest.read_text()).get("recipe") == asdict(recipe)
