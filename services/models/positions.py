"""The most tokens of a row that a model reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig


def max_positions(config: PreTrainedConfig) -> int | None:
    """Returns the most tokens of a row that a model reads; None for no limit.

    With rotary embeddings of type `longrope` (Phi 3 and 4), these are `original_max_position_embeddings`: if one row of
    a micro-batch has more, transformers rotates all positions of all its rows differently, so that a row's numbers
    would depend on its neighbours.
    """
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), *_longrope_limits(config)]
    return min((limit for limit in limits if limit), default=None)


def longest_row(config: PreTrainedConfig, *limits: int) -> int:
    """Returns the most tokens of a row that a model reads and that other limits, at least one, allow."""
    return min(filter(None, [*limits, max_positions(config)]))


def _longrope_limits(config: Any) -> Iterator[int | None]:
    """Yields the positions up to which each kind of layer with embeddings of type longrope has its first factors."""
    given: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for each in (given, *given.values()):
        if isinstance(each, Mapping) and each.get("rope_type") == "longrope":
            yield each.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
