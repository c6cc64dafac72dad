"""Settings of role `novelty`; read by controller, launcher and ranks, so without torch."""

from pydantic import Field

from settings.service import ServiceTable


class NoveltyTable(ServiceTable):
    """Settings of a service that scores how new responses are."""

    ngram: int = Field(default=3, ge=1)
    """Number of consecutive tokens that are counted together."""
