"""Tracks a run in Weights & Biases. Server, account and mode are those of its environment variables, such as
WANDB_API_KEY, WANDB_ENTITY and WANDB_MODE=offline."""

from __future__ import annotations

import importlib
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.tracking.metrics import Sample
from controller.tracking.tracker import END_S, Started, Status, TrackedRun, Tracker
from rlhf.errors import ConfigError

EXIT_CODES: Mapping[Status, int] = {"finished": 0, "failed": 1, "stopped": 130}


class WandbTracker(Tracker):
    """Tracker of a run in Weights & Biases, where the step of each row of the history is the step of the run. Its files
    are in `wandb/` of the run directory.

    The history of a run can only grow, so of a run that is resumed the rows stay that the server has. Offline, where
    nothing but the directory has them, they are written again from the files of the run.
    """

    @classmethod
    def check(cls) -> None:
        """Raises ConfigError where the package is missing, or wandb is online and has no API key."""
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(f"wandb: {error}; pip install 'rlhf-cluster[wandb]'") from None
        settings = wandb.setup().settings
        if settings.mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "wandb has no API key: set WANDB_API_KEY, or run `wandb login`, or set WANDB_MODE=offline"
            )

    def start(self, run: TrackedRun, config: Mapping[str, Any], resumed_id: str) -> Started:
        wandb = importlib.import_module("wandb")
        earlier = list((run.directory / "wandb").glob(f"offline-run-*-{resumed_id}")) if resumed_id else []
        self._run = wandb.init(
            project=run.project,
            id=resumed_id or secrets.token_hex(6),
            name=run.name,
            dir=str(run.directory),
            config={**config, "identity": run.identity},
            job_type=run.algorithm,
            resume="allow",
            # A process may track several runs one after another.
            reinit="create_new",
            settings=wandb.Settings(
                # The terminal belongs to the run, and its code and its git remote are not to be uploaded.
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                finish_timeout=END_S * 2 / 3,
            ),
        )
        if not self._run.offline:
            return Started(self._run.id, self._run.step - 1, self._run.url or "")
        for directory in earlier:
            shutil.rmtree(directory)
        return Started(self._run.id, url=f"offline, in {Path(self._run.dir).parent}; wandb sync uploads it")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        wandb = importlib.import_module("wandb")
        columns = list(samples[0].fields)
        rows = [[*sample.fields.values()] for sample in samples]
        self._run.log({"samples": wandb.Table(columns=columns, data=rows)}, step=step)

    def end(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=EXIT_CODES[status])
