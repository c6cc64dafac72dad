"""SIGTERM as a request to end after the present step, with a checkpoint, within a grace period."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


class Termination:
    """Handlers of SIGTERM for a process that exists for one run.

    Attributes:
        grace_s: Time in seconds that the run has after SIGTERM to reach its next checkpoint. 0: SIGTERM interrupts it
            at once, by a KeyboardInterrupt that has the number of the signal.
        is_requested: Whether SIGTERM has come within a grace period.
        is_overdue: Whether a grace period is over, by its end or by a second SIGTERM.
    """

    def __init__(self) -> None:
        self.grace_s = 0.0
        self.is_requested = False
        self.is_overdue = False

    def install(self) -> None:
        """Installs the handlers of SIGTERM and SIGALRM in this process, from its main thread."""
        signal.signal(signal.SIGTERM, self._asked)
        signal.signal(signal.SIGALRM, self._interrupt)

    def end_if_requested(self) -> None:
        """Raises KeyboardInterrupt with the number of SIGTERM if it has come."""
        if self.is_requested:
            self._interrupt()

    def _asked(self, number: int, frame: object) -> None:
        if not self.grace_s or self.is_requested:
            self._interrupt()
        self.is_requested = True
        signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        text = f"SIGTERM: a checkpoint follows this step, within {self.grace_s:g} s\n"
        os.write(2, text.encode())

    def _interrupt(self, number: int = 0, frame: object = None) -> NoReturn:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.grace_s, self.is_requested, self.is_overdue = 0.0, False, self.is_requested
        raise KeyboardInterrupt(signal.SIGTERM)
