"""The rows of a step (W of HybridFlow, algorithm 1): number, lengths of prompts and responses, and updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from controller.config.config import Config
from rlhf.errors import ConfigError
from settings.memory.use import RowSizes


@dataclass(frozen=True)
class LengthShares:
    """Distribution of lengths: pairs of a number of tokens and its share, in ascending order of tokens."""

    shares: tuple[tuple[int, float], ...]

    @staticmethod
    def of(*lengths: int | tuple[int, float]) -> LengthShares:
        """Returns the distribution of the lengths that are given, each alone or with a weight."""
        pairs = [(each, 1.0) if isinstance(each, int) else each for each in lengths]
        total = sum(weight for _, weight in pairs)
        return LengthShares(tuple(sorted((tokens, weight / total) for tokens, weight in pairs)))

    @staticmethod
    def parse(text: str) -> LengthShares:
        """Parses "1024", or lengths with weights, "256:0.5,1024:0.5".

        Raises:
            ConfigError: A length is no integer of at least 1, or a weight no number above 0.
        """
        pairs = []
        for each in text.split(","):
            length, _, weight = each.partition(":")
            try:
                pairs.append((int(length), float(weight or 1)))
            except ValueError:
                pairs.append((0, 0.0))
            if pairs[-1][0] < 1 or not 0 < pairs[-1][1] < float("inf"):
                raise ConfigError(f"lengths {text!r}: {each!r} is not TOKENS or TOKENS:WEIGHT, both above 0")
        return LengthShares.of(*pairs)

    @property
    def mean(self) -> float:
        """Mean number of tokens."""
        return sum(tokens * share for tokens, share in self.shares)

    @property
    def longest(self) -> int:
        """Largest number of tokens."""
        return self.shares[-1][0]

    def segments(self) -> Iterator[tuple[int, int, float]]:
        """Yields (first, last, share): from position `first` up to before `last`, the share of rows that are longer."""
        first, left = 0, 1.0
        for tokens, share in self.shares:
            if tokens > first:
                yield first, tokens, left
            first, left = tokens, left - share


@dataclass(frozen=True)
class Workload:
    """Rows of a step.

    Attributes:
        rows: Rows of the batch of a step.
        prompts, responses: Lengths of prompts and of responses.
        mini_batches: Optimizer steps of one pass over the rows.
        epochs, critic_epochs: Passes over the rows in an update of an actor and of a critic.
        snapshots: Whether an update of several optimizer steps first copies weights and moments to host memory, as the
            services of this project do.
    """

    rows: int
    prompts: LengthShares
    responses: LengthShares
    mini_batches: int = 1
    epochs: int = 1
    critic_epochs: int = 1
    snapshots: bool = True

    @property
    def tokens(self) -> float:
        """Mean number of tokens of all rows."""
        return self.rows * (self.prompts.mean + self.responses.mean)

    def row_sizes(self, *, is_critic: bool = False) -> RowSizes:
        """Returns the sizes that memory is predicted for: all rows of the longest length."""
        steps = self.mini_batches * (self.critic_epochs if is_critic else self.epochs)
        return RowSizes(self.prompts.longest, self.responses.longest, self.rows, steps)


def workload_of(
    config: Config, prompts: LengthShares | None = None, responses: LengthShares | None = None
) -> Workload:
    """Returns the workload of a run.

    Args:
        config: Configuration of the run.
        prompts: LengthShares of prompts. Default: `data.max_prompt_tokens`.
        responses: LengthShares of responses. Default: `rollout.max_response_tokens`.

    Raises:
        ConfigError: Prompts have no length, or there are longer ones than the configuration allows.
    """
    longest, algorithm = config.data.max_prompt_tokens, config.algorithm
    if prompts is None and not longest:
        raise ConfigError("data.max_prompt_tokens: set it, or give the lengths of prompts with --prompts")
    prompts = prompts or LengthShares.of(longest)
    responses = responses or LengthShares.of(config.rollout.max_response_tokens)
    if longest and prompts.longest > longest:
        raise ConfigError(
            f"--prompts: {prompts.longest} tokens are more than data.max_prompt_tokens, {longest}"
        )
    if responses.longest > config.rollout.max_response_tokens:
        raise ConfigError(
            f"--responses: {responses.longest} tokens are more than rollout.max_response_tokens, "
            f"{config.rollout.max_response_tokens}"
        )
    rows = config.rows_per_step
    return Workload(
        rows, prompts, responses, config.mini_batches(rows), algorithm.epochs, algorithm.critic_epochs
    )
