"""HH-RLHF (Bai et al. 2022, arXiv 2204.05862): from whole dialogues to demonstrations, pairs and prompts."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
Count = Callable[[str], int]
"""Function that returns the number of tokens of a text."""


@dataclass(frozen=True)
class Pair:
    """One dialogue with two alternative last answers.

    Attributes:
        prompt: The dialogue up to where the assistant speaks last.
        chosen, rejected: Its two answers there; people preferred the chosen one.
    """

    prompt: str
    chosen: str
    rejected: str

    @property
    def opening(self) -> str:
        """First turn of the human."""
        return self.prompt.partition(ASSISTANT)[0]


def read_pairs(path: Path) -> list[Pair]:
    """Reads pairs from a JSONL file, gzipped where its name ends with .gz, each row with two dialogues, `chosen` and
    `rejected`. Leaves out rows whose dialogues differ before the last answer, and rows whose two last answers are
    equal or of which one is empty.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [json.loads(line) for line in content.decode("utf-8").split("\n") if line]
    ends = [(_last_answer(row["chosen"]), _last_answer(row["rejected"])) for row in rows]
    return [
        Pair(prompt, chosen, rejected)
        for (prompt, chosen), (other, rejected) in ends
        if prompt == other and chosen.strip() and rejected.strip() and chosen != rejected
    ]


def _last_answer(dialogue: str) -> tuple[str, str]:
    before, mark, answer = dialogue.rpartition(ASSISTANT)
    return before + mark, answer.rstrip()


def is_heldout(pair: Pair, percent: int) -> bool:
    """Whether a pair is for evaluation only, as about `percent` % are. A hash of `opening` decides, so that pairs with
    the same opening are either all held out or all for training."""
    digest = hashlib.sha256(pair.opening.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < percent


def shortened(prompt: str, count: Count, most: int) -> str:
    """Returns the longest end of a prompt that consists of whole turns and has at most `most` tokens; empty where the
    last turn alone has more. A turn is a text of the human and the answer to it."""
    turns = prompt.split(HUMAN)[1:]
    kept = ""
    for turn in reversed(turns):
        longer = HUMAN + turn + kept
        if count(longer) > most:
            break
        kept = longer
    return kept


def answers(pair: Pair) -> Iterable[tuple[str, str]]:
    """Yields (dialogue up to the answer, answer) for each answer of the assistant that is not empty, in order; the
    chosen one is the last."""
    dialogue = pair.prompt + pair.chosen
    end = dialogue.find(ASSISTANT)
    while end >= 0:
        begin = end + len(ASSISTANT)
        after = dialogue.find(HUMAN, begin)
        answer = dialogue[begin : after if after >= 0 else len(dialogue)]
        if answer.strip():
            yield dialogue[:begin], answer
        end = dialogue.find(ASSISTANT, begin) if after >= 0 else -1
