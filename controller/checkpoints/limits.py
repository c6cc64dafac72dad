"""Limits on the length of the rows that a run draws. Checkpoints hold them, and a resumed run draws by the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controller.config.config import Config
from controller.data.draws import Limit, prompt_limit, text_limit
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

Services = Mapping[str, worker_pb2.DescribeResponse]
Limits = tuple[Limit | None, Limit | None]
"""Limits on the length of prompts and of the texts of data.pretrain; None: any length."""
PROMPTS, TEXTS = "prompts", "texts"


def row_limits(config: Config, services: Services, before: Mapping[str, int | None] | None = None) -> Limits:
    """Returns the limits on the length of rows, None where there are none.

    Args:
        config: Configuration of the run.
        services: Descriptions of the services that read token ids, by name.
        before: For a resumed run, the limits of its checkpoint, as `limits_as_json` returned them: they hold, although
            services may read longer rows now, so that the run draws the rows that it would have drawn. Default: those
            of the configuration and the services hold.

    Raises:
        ConfigError: Services read shorter rows than those of the checkpoint; or tokens cannot be counted and were
            counted then, or a key needs their number.
    """
    prompts = prompt_limit(config, services)
    texts = text_limit(config, services) if config.data.pretrain else None
    if before is None:
        return prompts, texts
    response = config.rollout.max_response_tokens
    return (
        _as_before(
            PROMPTS, prompts, before[PROMPTS], _too_small(config, services, before[PROMPTS], response)
        ),
        _as_before(TEXTS, texts, before[TEXTS], _too_small(config, services, before[TEXTS], 1)),
    )


def limits_as_json(limits: Limits) -> dict[str, int | None]:
    """Returns the maximum number of tokens of prompts and of texts, for a checkpoint; None for any."""
    return {name: each and each.tokens for name, each in zip((PROMPTS, TEXTS), limits, strict=True)}


def _as_before(rows: str, now: Limit | None, before: int | None, too_small: str) -> Limit | None:
    """Returns the limit of the checkpoint, `before`, on the length of `rows` (prompts or texts). Raises ConfigError
    where the present limit, `now`, is lower because of `too_small`, or tokens cannot be counted."""
    if before is None:
        return None
    if now is None:
        raise ConfigError(
            f"data.tokenizer: {rows} of more than {before} tokens were left out when the checkpoint was written, and "
            "tokens cannot be counted here"
        )
    if now.tokens < before:
        raise ConfigError(
            f"{rows} had up to {before} tokens when the checkpoint was written, and here only those of up to "
            f"{now.tokens} can be read ({now.why}), so the run would go on with other rows; {too_small}"
        )
    return now if now.tokens == before else replace(now, tokens=before, why="the run before it was resumed")


def _too_small(config: Config, services: Services, before: int | None, beside: int) -> str:
    """Returns what has to change so that the services read rows of `before` tokens and `beside` more: keys with their
    lowest values, or else the services whose models or servers read fewer."""
    needed = (before or 0) + beside
    keys = [
        f"services.{name}.{key}"
        for name in services
        for key, most in config.services[name].row_limits.items()
        if most < needed
    ]
    if keys:
        return f"set {', '.join(keys)} to at least {needed}"
    short = (f"services.{name}" for name, each in services.items() if 0 < each.max_tokens < needed)
    return f"{', '.join(short)} has to read rows of {needed} tokens"
