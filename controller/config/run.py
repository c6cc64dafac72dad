"""Settings of the run: training steps, evaluation, seed, timeouts and directory."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from settings.strict import Positive, Strict


class RunTable(Strict):
    """The run: training steps, evaluation, seed, timeouts, and the directory that holds its own."""

    name: str = "run"
    """Name of the run; part of the name of its directory."""
    directory: Path = Path("runs")
    """Directory in which the run makes a directory of its own."""
    seed: int = Field(default=0, ge=0)
    """Seed of all randomness."""
    steps: Positive = 100
    """Training steps: one batch of prompts each."""
    evaluate_every: int = Field(default=10, ge=0)
    """Steps between evaluations on the held-out prompts; the run also evaluates before the first step and after the
    last. 0: only then."""
    evaluation_rows: Positive = 1024
    """Most held-out rows evaluated at the same time; the rows of one batch are freed before the next."""
    samples: int = Field(default=8, ge=0)
    """Sample responses written at each evaluation."""
    balance: bool = True
    """Deals sequences out to data ranks by their cost to compute, and not by count."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time one call may take from when it is sent; then the run ends, see docs/runs.md."""
    save_timeout_s: float = Field(default=3600.0, gt=0)
    """The same for calls that save, export or load a model, as at the begin of a run."""
    connect_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time to wait for running services to answer."""
