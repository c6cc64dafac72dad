"""A reference one of whose ranks fails alone in the middle of a call, as a rank out of memory would."""

from __future__ import annotations

from services.main import run
from services.reference.worker import ReferenceWorker


class LoneReference(ReferenceWorker):
    """Rank 0 fails where the others go on into the engine's collectives."""

    def forward(self, *arguments):
        if self.ranks.rank == 0:
            raise MemoryError("out of memory, says the test")
        return super().forward(*arguments)


if __name__ == "__main__":
    run("reference", "lone_reference:LoneReference")
