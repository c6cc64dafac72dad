"""The class of algorithms and the decorator that declares one. No other module knows an algorithm by name."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from controller.config.algorithm import AlgorithmTable
from controller.config.config import Config
from controller.role_groups.roles import group_type
from controller.training.run import Run
from rlhf.contract import group_methods
from rlhf.errors import ConfigError, InvalidRequest, RlhfError, one_line, printable
from rlhf.plugins import PluginError
from rlhf.roles import find_role
from settings.losses import LOSSES, PolicyLossTable, PpoOptions, ValueClipOptions, ValueLossTable
from settings.strict import Strict, check_table_type, validate

SCHEDULE = ("epochs", "mini_batch_size")
"""Keys of `[algorithm]` that every update reads. The tuples below hold the keys that the update of the policy, that
of the critic, the reward, `shaping.shaped`, and the KL penalty in the reward read."""
POLICY = (
    *SCHEDULE,
    *(key for key in PolicyLossTable.model_fields if key != "pretrain_coefficient"),
    *PpoOptions.model_fields,
    "recompute_log_probs",
    "max_log_prob_drift",
    "on_truncated",
)
CRITIC = (
    "critic_epochs",
    "critic_warmup_steps",
    *ValueLossTable.model_fields,
    *ValueClipOptions.model_fields,
)
REWARD = ("on_failed_reward", "reward_retries")
SHAPING = ("reward_normalization", "reward_clip")
KL_REWARD = ("kl_reward_coefficient", "kl_reward_estimator", "kl_target", "kl_horizon")


class NoOptions(Strict):
    """Empty type of `[algorithm.options]`, for algorithms without options."""


class UnreadOptions(Strict):
    """Type of `[algorithm.options]` for functions that accept the config of any algorithm, such as an evaluation. All
    options are accepted and ignored."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: a function that takes a `Run`, with a declaration of what it needs.

    Attributes:
        function: The function, called as `function(run)`, or as `function(run, options)` where `options` is given.
        services: Role of each service that it needs, by name; None: all services of the configuration.
        options: Type of `[algorithm.options]`. Default: no options.
        defaults: Defaults of this algorithm for keys of `[algorithm]`.
        compares_groups: Whether it compares the responses to a prompt with each other, and so needs at least 2.
        quickstart: Name of the bundled configuration that it runs with where none is given.
        columns: Names of the texts that every row of the data needs beside the prompt.
        trains: Name of the service that it trains.
        reads: Keys of `[algorithm]` that it reads beside its options, so that others are refused; None: all.
        check: Function that takes the configuration and the options, and raises ConfigError where they are
            incompatible; None: no further check.
        only_for: Key of `[algorithm]` for each service that is needed only where that key is not 0, by its name.
        optional: Names of those rewards that it uses only where the configuration has them.
        further: Function that takes the configuration and the options, and returns how many responses the ranks that
            generate keep beside one per row: most of a step, and most of a batch of an evaluation. None: none.
    """

    function: Callable[..., Any]
    services: Mapping[str, str] | None = None
    options: type[Strict] = NoOptions
    defaults: Mapping[str, Any] = field(default_factory=dict)
    compares_groups: bool = False
    quickstart: str = "quickstart"
    columns: tuple[str, ...] = ()
    trains: str = "actor"
    reads: frozenset[str] | None = None
    check: Callable[[Config, Any], None] | None = None
    only_for: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    further: Callable[[Config, Any], tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        check_table_type(self.options, "an algorithm")

    @property
    def name(self) -> str:
        """Name of the algorithm: that of its function, or of its type where a callable object has no name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def _takes_options(self) -> bool:
        return self.options not in (NoOptions, UnreadOptions)

    def __call__(self, run: Run) -> None:
        """Executes the algorithm on a run, whose configuration must be one that `configure` returned. An
        InvalidRequest of this process, such as for a column that is missing, gets a note with the line of the
        algorithm, unless that is one of this package.

        Raises:
            RlhfError: The run failed, or the function raised another exception, whose traceback is logged then.
        """
        options = ()
        if self._takes_options:
            options = (self.options.model_validate(run.config.algorithm.options),)
        try:
            self.function(run, *options)
        except RlhfError as error:
            is_ours = isinstance(error, InvalidRequest) and not error.service
            if is_ours and (place := _place_in(self.function, error)):
                error.add_note(place)
            raise
        except Exception as error:
            place = _place_in(self.function, error)
            if not place:
                raise
            own = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            text = "".join(traceback.format_exception(type(error), error, own)).rstrip()
            logging.error("%s", printable(text))
            cause = one_line(f"{type(error).__name__}: {error}")
            raise RlhfError(f"algorithm {self.name} failed: {cause} ({place})") from error

    def configure(self, config: Config) -> Config:
        """Returns the configuration for a run of this algorithm: only the services that it needs, with the
        algorithm's defaults for keys that are not set, and all of its options.

        Raises:
            ConfigError: A service is missing or has another role, an option of the algorithm or of a loss is unknown
                or wrong, a key is set that the algorithm does not read, or the configuration is incompatible with it.
        """
        given = config.algorithm.model_dump(exclude_unset=True)
        defaults = {**(self._ahead_defaults if config.run.ahead else {}), **self.defaults}
        chosen = validate(AlgorithmTable, {**defaults, **given}, f"algorithm, for {self.name}")
        self._check_keys(given, chosen)
        options = validate(self.options, given.get("options", {}), f"algorithm.options of {self.name}")
        _check_callable(self, ("run", "options") if self._takes_options else ("run",))
        tables = config.model_dump(exclude_unset=True)
        tables["algorithm"] = {
            **defaults,
            **given,
            **self._loss_options(chosen),
            "options": options.model_dump(mode="json", exclude_none=True),
        }
        tables["services"] = {name: tables["services"][name] for name in self._needed(config)}
        configured = validate(Config, tables, f"for {self.name}")
        self._check(configured)
        if self.check:
            self.check(configured, options)
        return configured

    def further_responses(self, config: Config) -> tuple[int, int]:
        """Returns `further` of `config`, which `configure` must have returned."""
        options = self.options.model_validate(config.algorithm.options)
        return self.further(config, options) if self.further else (0, 0)

    def resolved(self, config: Config) -> dict[str, Any]:
        """Returns the tables of a config file for `config`, which `configure` must have returned: all keys that the
        algorithm reads, with their values, defaults included. `configure` accepts such a file again."""
        # The steps of a run of run.epochs are computed again where the file is read.
        unread = {
            "algorithm": self._unread(config.algorithm),
            "run": {"steps"} if config.run.epochs else set(),
        }
        return config.model_dump(mode="json", exclude_none=True, exclude=unread)

    @property
    def _ahead_defaults(self) -> dict[str, str]:
        """Defaults for keys of `[algorithm]` where steps overlap (`run.ahead`): the loss of a policy corrects for the
        older weights that generated its rows."""
        is_read = self.reads is None or "rollout_correction" in self.reads
        return {"rollout_correction": "taper"} if is_read else {}

    def _losses(self) -> list[str]:
        """Returns those of the keys surrogate and value_loss that the algorithm reads; both where `reads` is None."""
        return [loss for loss in LOSSES if self.reads is None or loss in self.reads]

    def _loss_options(self, table: AlgorithmTable) -> dict[str, Any]:
        """Returns the tables surrogate_options and value_loss_options, as far as the algorithm reads these losses: all
        options with their defaults, except those that are keys of `[algorithm]`."""
        return {
            f"{loss}_options": table.loss_options(loss).model_dump(
                mode="json", exclude_none=True, exclude=table.shared_options(loss)
            )
            for loss in self._losses()
        }

    def _unread(self, table: AlgorithmTable) -> set[str]:
        """Returns the keys of `[algorithm]` that neither the algorithm nor its losses read; none where `reads` is
        None."""
        if self.reads is None:
            return set()
        of_losses = [{f"{loss}_options", *table.shared_options(loss)} for loss in self._losses()]
        return AlgorithmTable.model_fields.keys() - self.reads - {"options"}.union(*of_losses)

    def _check_keys(self, given: Iterable[str], table: AlgorithmTable) -> None:
        unread = sorted(self._unread(table).intersection(given))
        if unread and self.reads is not None:
            raise ConfigError(
                f"{', '.join(f'algorithm.{key}' for key in unread)}: {self.name} has no use for this; of [algorithm] "
                f"it reads: {', '.join(sorted(self.reads))}"
            )

    def _needed(self, config: Config) -> Iterable[str]:
        """Returns the names of the services that the algorithm needs, in the order of the configuration.

        Raises:
            ConfigError: A service is missing, or has a different role.
        """
        needed = (
            {name: table.role for name, table in config.services.items()}
            if self.services is None
            else _with_parts(self._of_use(self.services, config), config)
        )
        hosts = {config.also_served[name] for name in needed if name in config.also_served}
        for name, role in needed.items():
            table = config.services.get(name)
            if table is None and role == name and name in config.also_served:
                continue
            if table is None:
                key = self.only_for.get(name)
                raise ConfigError(
                    f"services.{name}: {self.name} needs this service, of role {role}"
                    f"{f', where algorithm.{key} is not 0' if key else ''}; the config has: "
                    f"{', '.join(sorted(config.services))}"
                )
            if role not in (table.role, find_role(table.role).name):
                raise ConfigError(
                    f"services.{name}.role: {self.name} needs role {role} here, not {table.role}"
                )
        # Rows that have their responses already need none generated.
        generated = () if self.columns else needed
        receivers = {config.generators[name] for name in generated if name in config.generators}
        receivers |= {config.valuers[name] for name in needed if name in config.valuers}
        return [name for name in config.services if name in {*needed, *hosts, *receivers}]

    def _of_use(self, services: Mapping[str, str], config: Config) -> dict[str, str]:
        """Returns `services` without those that `only_for` ties to a key of `[algorithm]` whose value is 0, and without
        optional ones that the configuration does not have."""
        given = config.algorithm.model_dump(exclude_unset=True)
        table = AlgorithmTable(**{**self.defaults, **given})
        return {
            name: role
            for name, role in services.items()
            if (name not in self.only_for or getattr(table, self.only_for[name]))
            and (name not in self.optional or config.has_reward(name))
        }

    def _check(self, config: Config) -> None:
        for name, table in config.services.items():
            try:
                group_type(table.role)
                group_methods(table.role)
            except PluginError as error:
                raise ConfigError(f"services.{name}.role: {error}") from error
        if (
            config.data.turns == "all"
            and "response" not in self.columns
            and self.options is not UnreadOptions
        ):
            raise ConfigError(
                f'data.turns: {self.name} learns no responses of the data, so it has to be "last" (given: "all")'
            )
        samples = config.rollout.samples_per_prompt
        if self.compares_groups and samples < 2:
            raise ConfigError(
                f"rollout.samples_per_prompt: {self.name} compares the responses to a prompt, so there have to be at "
                f"least 2 (given: {samples})"
            )
        roles = {find_role(table.role).name for table in config.services.values()}
        warmup = config.algorithm.critic_warmup_steps if self.options is not UnreadOptions else 0
        if warmup and "critic" not in roles:
            raise ConfigError(
                f"algorithm.critic_warmup_steps: {self.name} has no service of role critic, so it has to be 0 "
                f"(given: {warmup})"
            )
        coefficient = config.algorithm.kl_loss_coefficient
        if coefficient and self.services is not None and "reference" not in self.services.values():
            raise ConfigError(
                f"algorithm.kl_loss_coefficient: {self.name} works without a reference policy, so it has to be 0 "
                f"(given: {coefficient:g})"
            )


def _check_callable(algorithm: Algorithm, given: tuple[str, ...]) -> None:
    """Raises ConfigError where the function of an algorithm cannot be called with the arguments `given`, or would not
    run when it is."""
    function, name = algorithm.function, algorithm.name
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "async" if inspect.iscoroutinefunction(function) else "a generator"
        raise ConfigError(f"algorithm {name} is {kind}, and has to be a plain function")
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # of an extension module
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        lacks_options = "options" not in given and "missing" in str(error)
        declared = "; options are given where the decorator declares them" if lacks_options else ""
        raise ConfigError(
            f"algorithm {name}{signature} cannot be called with ({', '.join(given)}): {error}{declared}"
        ) from None


def _with_parts(services: Mapping[str, str], config: Config) -> dict[str, str]:
    """Returns the role of each service by name, with composed rewards and costs replaced by the services that they
    are sums of."""
    parts: dict[str, str] = {}
    for name, role in services.items():
        recipes = config.recipes(name).values() if role == "reward" else [{name: 1.0}]
        parts |= {part: role for recipe in recipes for part in recipe}
    return parts


def algorithm(
    *,
    services: Iterable[str] | Mapping[str, str],
    options: type[Strict] = NoOptions,
    defaults: Mapping[str, Any] | None = None,
    compares_groups: bool = False,
    quickstart: str = "quickstart",
    columns: tuple[str, ...] = (),
    trains: str = "actor",
    reads: Iterable[str] | None = None,
    check: Callable[[Config, Any], None] | None = None,
    only_for: Mapping[str, str] | None = None,
    optional: tuple[str, ...] = (),
    further: Callable[[Config, Any], tuple[int, int]] | None = None,
) -> Callable[[Callable[..., None]], Algorithm]:
    """Decorator that makes an `Algorithm` of a function.

    Args:
        services: Names of the services that it needs, where each is named like its role; else roles by name.
        options, defaults, compares_groups, quickstart, columns, trains, reads, check, only_for, optional, further: As
            in `Algorithm`.
    """
    if isinstance(services, str):
        raise TypeError(f"services: {services!r} is a text; one name is ({services!r},)")
    roles = dict(services) if isinstance(services, Mapping) else {name: name for name in services}

    def declare(function: Callable[..., None]) -> Algorithm:
        keys = None if reads is None else frozenset(reads)
        return Algorithm(
            function,
            roles,
            options,
            defaults or {},
            compares_groups,
            quickstart,
            columns,
            trains,
            keys,
            check,
            only_for or {},
            optional,
            further,
        )

    return declare


def _place_in(function: Callable[..., Any], error: BaseException) -> str:
    """Returns file and line of the innermost frame of an error's traceback that is in the file of `function`; an empty
    text where there is none, or the file is one of this package."""
    path = getattr(getattr(function, "__code__", None), "co_filename", "")
    if not path or Path(__file__).parents[1] in Path(path).parents:
        return ""
    lines = [
        line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path
    ]
    return f"{Path(path).name}:{lines[-1]}" if lines else ""
