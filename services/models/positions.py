"""The most tokens of a row that a model reads."""

from __future__ import annotations

from transformers import PreTrainedConfig

from settings.fit import longrope_positions


def max_positions(config: PreTrainedConfig) -> int | None:
    """Returns the most tokens of a row that a model reads, with rotary embeddings of type longrope those of
    `settings.fit.longrope_positions`; None for no limit."""
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), *longrope_positions(config.to_dict())]
    return min((limit for limit in limits if limit), default=None)


def longest_row(config: PreTrainedConfig, *limits: int) -> int:
    """Returns the most tokens of a row that a model reads and that other limits, at least one, allow."""
    return min(filter(None, [*limits, max_positions(config)]))
