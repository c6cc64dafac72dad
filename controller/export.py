"""Exports the model of a checkpoint as a Hugging Face directory, by the service that has trained it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tomli_w

from controller.checkpoints.resume_point import ResumePoint
from controller.config.config import Config
from controller.launch import LaunchedServices
from controller.opening import explained, session_of
from controller.role_groups.cluster import Cluster, Restoration, SavedState
from controller.tracking.contents import CONFIG_FILE
from rlhf.errors import ConfigError, RlhfError
from rlhf.security import adopted
from rlhf.v1 import worker_pb2
from settings.strict import override, validate


def export(
    directory: Path,
    out: Path,
    *,
    service: str = "actor",
    dtype: str = "",
    settings: tuple[str, ...] = (),
    launch: bool = False,
    take_over: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Writes the model that a service had at a checkpoint of its run, as the run writes it at its end: the service
    loads the checkpoint and exports. Reads no data. Returns the sha256 (hex) over all weights, as `actor_sha256` of
    `summary.json`.

    Args:
        directory: The checkpoint, RUN/checkpoints/step-N.
        out: Directory of the model, on the hosts of the ranks; replaces an earlier export alone.
        service: Name of the service.
        dtype: Type of the weights, float32 or bfloat16. Default: `export_dtype` of the service.
        settings: Overrides "key.path=value" of the config of the checkpoint's run.
        launch, take_over: As in `controller.job.run`. A service that is launched may write to the parent of `out`.
        say: Called with lines of text.

    Raises:
        ConfigError: The directory is no complete checkpoint, or has no such service.
        RlhfError: A file of the checkpoint is damaged, or the service could not load or write it.
    """
    point, target = ResumePoint.at(directory), Path(os.path.realpath(out))
    config = _config(directory, point, service, settings)
    if launch:
        roots = (target.parent, directory.resolve().parent)
        config = _with_service(config, service, output_roots=roots)
    states = {service: SavedState(point.place_of(service))}
    with contextlib.ExitStack() as opened:
        opened.enter_context(adopted(config.security.load()))
        opened.enter_context(explained(opened.enter_context(launched_alone(config)) if launch else None))
        cluster = Cluster(config, session_of(config.run, "export", time.time_ns(), take_over=take_over))
        opened.callback(cluster.close)
        restoration = Restoration(states, lambda held: states)
        cluster.connect(say, outputs={service: [target]}, restoration=restoration)
        group = cluster.group(service)
        exported = group.save_checkpoint(str(target), worker_pb2.CHECKPOINT_FORMAT_HUGGING_FACE, dtype=dtype)
        return exported.records()[0].responses[0].sha256


def _config(directory: Path, point: ResumePoint, service: str, settings: tuple[str, ...]) -> Config:
    """Returns the config of the checkpoint's run with this service alone. Raises ConfigError where the checkpoint has
    no state of it."""
    config = validate(Config, override(point.facts["config"], settings), str(directory))
    saved = [name for name, table in config.services.items() if table.keeps_state]
    if service not in saved:
        raise ConfigError(f"{directory} has no weights of a service {service!r}; it has: {', '.join(saved)}")
    update = {"rewards": {}, "placement": None, "devices": []}
    update |= {"services": {service: config.services[service]}}
    return config.without_outputs().model_copy(update=update)


def _with_service(config: Config, name: str, **update: object) -> Config:
    table = config.services[name].model_copy(update=update)
    return config.model_copy(update={"services": {name: table}})


@contextlib.contextmanager
def launched_alone(config: Config) -> Iterator[LaunchedServices]:
    """Context manager that starts the service of a config. Its log is kept where an error names it."""
    logs = Path(tempfile.mkdtemp(prefix="rlhf-export-"))
    path, is_named = logs / CONFIG_FILE, False
    try:
        path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
        with LaunchedServices(config, path, logs) as launched:
            yield launched
    except RlhfError as error:
        is_named = str(logs) in str(error)
        raise
    finally:
        if not is_named:
            shutil.rmtree(logs, ignore_errors=True)
