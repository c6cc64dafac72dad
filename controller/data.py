"""Prompts: which rows a step trains on is a function of (seed, step), so a run can begin at any step."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from controller.dataflow import FutureBatch
from rlhf.errors import ConfigError


@dataclass(frozen=True)
class PromptData:
    """Rows of a JSONL file: `prompt`, optional `ground_truth`, and any further fields as metadata.

    Attributes:
        prompts, ground_truths: Text per row.
        metadata: Further fields per row, as JSON.
    """

    prompts: list[str]
    ground_truths: list[str]
    metadata: list[str]

    @staticmethod
    def load(path: Path, key: str) -> PromptData:
        """Reads a file.

        Args:
            key: Config key that names it, for messages.

        Raises:
            ConfigError: The file is missing, empty, or a line of it is not a row.
        """
        try:
            # Only \n ends a line: text in JSON may have other line separators in it.
            lines = path.read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise ConfigError(f"{key}: {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{key}: {path}: not UTF-8: {error.reason} at byte {error.start}") from None
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        rows = [_row(line, f"{key}: {path}:{number}") for number, line in numbered]
        if not rows:
            raise ConfigError(f"{key}: {path} has no rows")
        return PromptData(*(list(column) for column in zip(*rows, strict=True)))

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, rows: np.ndarray) -> FutureBatch:
        """Columns prompt, ground_truth and metadata of these rows."""
        return FutureBatch.of(
            prompt=[self.prompts[row] for row in rows],
            ground_truth=[self.ground_truths[row] for row in rows],
            metadata=[self.metadata[row] for row in rows],
        )

    def rows_of_step(self, step: int, count: int, seed: int) -> np.ndarray:
        """Rows of a step, from 1: pass after pass over all rows, each in an order drawn from (seed, pass)."""
        first = (step - 1) * count
        positions = np.arange(first, first + count)
        passes = {int(p): self._order(int(p), seed) for p in np.unique(positions // len(self))}
        return np.asarray(
            [passes[int(position) // len(self)][position % len(self)] for position in positions]
        )

    def _order(self, number: int, seed: int) -> np.ndarray:
        digest = hashlib.sha256(f"data/{seed}/{number}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        return generator.permutation(len(self))


def _row(line: str, where: str) -> tuple[str, str, str]:
    try:
        row = json.loads(line)
        # Half a surrogate pair and NaN pass for JSON here, but not on the wire.
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or "prompt" not in row:
        raise ConfigError(f"{where}: not a JSON object with a prompt")
    prompt = row.pop("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: prompt is not a text, or empty: {prompt!r}")
    return prompt, _text(row.pop("ground_truth", None)), json.dumps(row)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
