"""The facts that the results of a run depend on, beside the state in a checkpoint: its config, the contents of its
data and models, and the platform of its services. A resumed run is compared with those of its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from controller.checkpoints.digests import fingerprint, model_fingerprint
from controller.config.config import Config
from controller.data import chat
from controller.data.prompts import PromptData, TextData
from controller.data.response_end import RESPONSE_END
from controller.role_groups.admission import WHERE_IT_RUNS, differences, shown
from rlhf.errors import ConfigError
from settings.memory.services import computed_dtype

MAY_DIFFER = frozenset(
    {
        *(
            f"run.{key}"
            for key in ("steps", "epochs", "evaluate_every", "patience", "verify_every", "samples", "name")
        ),
        *(
            f"run.{key}"
            for key in (
                "directory",
                "call_timeout_s",
                "save_timeout_s",
                "connect_timeout_s",
                "rollouts_every",
            )
        ),
        *(f"data.{key}" for key in ("train", "heldout", "evaluated_rows", "pretrain", "tokenizer")),
        *(f"rollout.environment.{key}" for key in ("timeout_s", "concurrency")),
        *(f"data.sources.*.{key}" for key in ("path", "heldout", "evaluated_rows", "evaluation")),
        "checkpoint",
        "devices",
        "placement",
        "pools",
        "rollout.evaluation",
        "security",
        "tracking",
    }
)
"""Keys and tables of the config that may differ where a run is resumed: they change no training step, or name files
whose contents are compared."""
OF_A_SERVICE = (WHERE_IT_RUNS - {"role", "ranks"}) | {
    "arena_device_mb",
    "arena_mb",
    "checksums",
    "model",
    "output_roots",
    "stuck_timeout_s",
    "transports",
    # Of rewards: where endpoints are, and how long and how many rows are waited for.
    "concurrency",
    "row_timeout_s",
    *(
        f"{table}.{key}"
        for table in ("judge", "http")
        for key in ("concurrency", "request_timeout_s", "retries", "backoff_s")
    ),
    "judge.url",
    "http.urls",
}
"""Keys of a service's table that may differ likewise."""
LEARNING_RATE = frozenset(
    f"optimizer.{key}"
    for key in ("learning_rate", "warmup_steps", "warmup_ratio", "schedule", "total_steps", "min_ratio")
)
"""Keys of a service's table that may differ although they change later results; see `changed_learning_rates`."""
ELSEWHERE = frozenset(
    {
        "activation_checkpointing",
        "engine",
        "engine_options",
        "generation_mesh",
        "kernels",
        "matmul",
        "mesh",
        "micro_batch_tokens",
        "packing",
        "ranks",
        "rollout_engine",
        "rollout_options",
        "rollout_tokens",
        "sequence_parallel",
        "shards_over_data",
        "threads",
        "transition",
        "vllm",
        "zero",
    }
)
"""Keys of a service's table that may also differ with --elsewhere: they change only the order of floating-point
operations. Some of them limit the length of rows, which is compared separately (`limits`)."""
_DTYPE = re.compile(r"services\.[^.]+\.dtype")
_NUMBER = re.compile(r"\.\d+\.")


def contents_of(
    config: Config, data: tuple[PromptData, PromptData], pretrain: TextData | None
) -> dict[str, str]:
    """Returns fingerprints of the data, of the tokenizer that the controller reads, and of the model directories of all
    services, by config key; empty texts for directories that this host cannot read."""
    train, heldout = (each.fingerprints() for each in data)
    found = {f"data.train.{number}": each for number, each in enumerate(train)}
    found |= {f"data.heldout.{number}": each for number, each in enumerate(heldout)}
    if pretrain is not None:
        found["data.pretrain"] = pretrain.fingerprint()
    if config.tokenizer is not None:
        files = (config.tokenizer / name for name in chat.FILES)
        found["data.tokenizer"] = fingerprint(path for path in files if path.is_file())
    models = {name: table.model_directory for name, table in config.services.items()}
    cached = {path: model_fingerprint(path) for path in models.values() if path is not None}
    return found | {f"services.{name}.model": cached[path] for name, path in models.items() if path}


def check_config(before: Mapping[str, Any], now: Mapping[str, Any], *, elsewhere: bool) -> None:
    """Checks that the config of a resumed run differs only in allowed keys.

    Args:
        before, now: Tables of the config of the checkpoint, and of the resumed run, all defaults included.
        elsewhere: Whether keys of `ELSEWHERE` may differ, and also `dtype` if it is "auto" in one of the two configs;
            `check_dtypes` compares the resolved types.

    Raises:
        ConfigError: Further keys differ; the text names them with both values.
    """
    found = [
        (key, there, here)
        for key, there, here in differences(_with_numbered_sources(before), _with_numbered_sources(now))
        if not _may_differ(key, elsewhere=elsewhere)
        and not (elsewhere and _DTYPE.fullmatch(key) and "auto" in (there, here))
    ]
    if found:
        raise ConfigError(
            f"{_listed(found)}. A resumed run may change only {', '.join(sorted(MAY_DIFFER))}, learning rates, and "
            f"where its services run{_hint(elsewhere, found)}"
        )


def changed_learning_rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the value before and now of each key of `LEARNING_RATE` that a resumed run has changed, by key; arguments
    as of `check_config`."""
    return {
        key: (there, here)
        for key, there, here in differences(before["services"], now["services"], "services")
        if key.split(".", 2)[-1] in LEARNING_RATE
    }


def check_contents(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Checks that data, tokenizer and models still have the fingerprints of the checkpoint. A model that was not
    readable for one of the two runs passes.

    Raises:
        ConfigError: The contents of a key differ, or the tokenizer is not there; the text names the keys.
    """
    if now.get("data.tokenizer") == fingerprint(()) != before.get("data.tokenizer"):
        raise ConfigError(
            "data.tokenizer, by default the model of the actor: the files that the run was trained with are not there; "
            "a relative path is relative to the working directory"
        )
    changed = [key for key, there, here in differences(dict(before), dict(now)) if there and here]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: the contents differ from those that the run was trained on, so its position would "
            "refer to other rows or weights"
        )


def check_response_end(before: Mapping[str, Any], now: str | None) -> None:
    """Checks that responses to conversations that are learned still end as when the checkpoint was written. One of an
    earlier version, which does not say how, passes.

    Args:
        before: Facts of the checkpoint.
        now: The text that ends them; empty for the EOS token, None where none are learned.

    Raises:
        ConfigError: They end otherwise.
    """
    if (there := before.get(RESPONSE_END, now)) != now:
        raise ConfigError(
            f"data.tokenizer, by default the model of the actor: responses to conversations ended with {ending(there)} "
            f"when the checkpoint was written and end with {ending(now)} now: its tokenizer.json, config.json or "
            "generation_config.json is another"
        )


def ending(text: str | None) -> str:
    """Returns the end of responses for messages: a text, or, where that is empty, the EOS token."""
    return repr(text) if text else "the EOS token of the tokenizer"


def check_platform(before: Mapping[str, Any], now: Mapping[str, Any], *, elsewhere: bool) -> None:
    """Checks that the services have the same platform as those of the checkpoint.

    Args:
        before, now: Platforms as `platform_of` returns them.
        elsewhere: Whether everything but the vocabulary may differ.

    Raises:
        ConfigError: A figure differs; the text names all of them with both values.
    """
    found = [
        (f"services.{key}", there, here)
        for key, there, here in differences(dict(before), dict(now))
        if not elsewhere or key.endswith(".vocabulary")
    ]
    if found:
        raise ConfigError(
            f"{_listed(found)}{'' if elsewhere else '. Results would not be bitwise equal'}"
            f"{_hint(elsewhere, found)}"
        )


def check_dtypes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Checks that the models of a resumed run compute in the same element types as before.

    Args:
        before, now: Types as `dtypes_of` returns them.

    Raises:
        ConfigError: A type differs; the text names all of them with both values.
    """
    found = [(f"services.{name}.dtype", there, now[name]) for name, there in before.items() if name in now]
    if found := [each for each in found if each[1] != each[2]]:
        keeping = " ".join(f"--set {key}={there}" for key, there, _ in found)
        raise ConfigError(f'{_listed(found)}; "auto" depends on the device. To keep the types: {keeping}')


def dtypes_of(dtypes: Mapping[str, str], platform: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the type that each service computes in, by name.

    Args:
        dtypes: `dtype` of the tables of services, by name.
        platform: Platform of the services, as `platform_of` returns it.
    """
    return {
        name: computed_dtype(dtype, on_gpu=platform[name]["device"] == "cuda")
        for name, dtype in dtypes.items()
        if name in platform
    }


def _may_differ(key: str, *, elsewhere: bool) -> bool:
    table, *rest = key.split(".")
    numbered = _NUMBER.sub(".*.", key)
    if {table, ".".join([table, *rest[:1]]), numbered, numbered.rpartition(".")[0]} & MAY_DIFFER:
        return True
    may = OF_A_SERVICE | LEARNING_RATE | (ELSEWHERE if elsewhere else set())
    return table == "services" and len(rest) > 1 and bool({rest[1], ".".join(rest[1:])} & may)


def _with_numbered_sources(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of a config with `data.sources` as a table by number, so that its keys are compared one by
    one."""
    data = dict(tables["data"])
    if sources := data.get("sources"):
        data["sources"] = {str(number): source for number, source in enumerate(sources)}
    return {**tables, "data": data}


def _listed(found: list[tuple[str, Any, Any]]) -> str:
    return "; ".join(
        f"{key} was {shown(there)} when the checkpoint was written and is {shown(here)} now"
        for key, there, here in found
    )


def _hint(elsewhere: bool, found: list[tuple[str, Any, Any]]) -> str:
    if elsewhere or not any(_is_of_a_service(key) for key, _, _ in found):
        return ""
    return "; --elsewhere resumes on other meshes, engines and machines, with results that differ by rounding"


def _is_of_a_service(key: str) -> bool:
    return key.startswith("services.") and not key.endswith(".vocabulary")
