"""Exports an engine's weights while they are gathered from the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from services.engines.agreement import RunToEnd, new_directory
from services.engines.collectives import digest_of_rank_0


def export_gathered(
    directory: Path,
    gathered: Iterable[tuple[str, Tensor]],
    write: Callable[[Path, Iterator[tuple[str, Tensor]]], str],
    tokenizer: PreTrainedTokenizerBase | None,
    progressed: Callable[[], None],
) -> str:
    """Writes a model directory on rank 0 from tensors that all ranks gather together. Collective.

    Args:
        directory: Path of the directory; replaces an earlier one.
        gathered: Name and whole tensor of each weight, one at a time; a collective iterable.
        write: Writes the tensors into a directory and returns one sha256 (hex) over all; called on rank 0.
        tokenizer: Tokenizer to write beside the model; None for none.
        progressed: Called after each tensor and each file.

    Returns:
        The sha256 that `write` returned, on every rank.

    Raises:
        OSError: The directory could not be written (rank 0; `PeerRankFailed` on the others).
    """
    collective, sha256 = RunToEnd(gathered, progressed), ""
    with new_directory(directory, progressed, collective) as partial:
        if dist.get_rank() == 0:
            sha256 = write(partial, collective)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
    return digest_of_rank_0(sha256)
