"""Settings of the run: training steps, evaluation, seed, timeouts and directory."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from settings.strict import Positive, Strict


class RunTable(Strict):
    """Settings of the run: training steps, evaluation, seed, timeouts, and the directory of its outputs."""

    name: str = "run"
    """Name of the run; part of the name of its directory."""
    directory: Path = Path("runs")
    """Parent directory: the run makes its own directory in it."""
    seed: int = Field(default=0, ge=0)
    """Seed of all randomness."""
    steps: Positive = 100
    """Number of training steps, with one batch of prompts each."""
    evaluate_every: int = Field(default=10, ge=0)
    """Number of steps between evaluations on the held-out prompts. The run also evaluates before the first step and
    after the last. 0: only then."""
    evaluation_rows: Positive = 1024
    """Maximum number of held-out rows in a batch of an evaluation; the rows of one batch are freed before the
    next."""
    samples: int = Field(default=8, ge=0)
    """Number of sample responses written to samples.jsonl at each evaluation."""
    verify_every: int = Field(default=0, ge=0)
    """Number of steps between verifications of the weights in the memory of all services, see docs/integrity.md. The
    run also verifies them before the first step, before each checkpoint and after the last step. 0: never."""
    balance: bool = True
    """Distributes sequences over data ranks by their estimated cost. false: by their number."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of a call, in seconds, from when it is sent; a call that exceeds it ends the run, see docs/runs.md."""
    save_timeout_s: float = Field(default=3600.0, gt=0)
    """Timeout, in seconds, of calls that save, export or load a model, as at the start of a run."""
    connect_timeout_s: float = Field(default=60.0, gt=0)
    """Timeout, in seconds, for all services to be reached at the start of a run."""
