"""The point that a resumed run goes on from: its last step, where all services still hold their states after it, or
else its newest checkpoint, which services load as far as they do not hold its states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from controller.checkpoints.facts import check_dtypes, check_platform, dtypes_of, ending
from controller.checkpoints.limits import row_limits
from controller.checkpoints.resume_point import ResumePoint
from controller.data.response_end import RESPONSE_END
from controller.plan import Plan
from controller.role_groups.admission import shown
from controller.role_groups.cluster import Restoration, SavedState
from controller.role_groups.discovery import reads_tokens
from controller.role_groups.platform import platform_of
from rlhf.errors import ConfigError
from rlhf.v1 import worker_pb2

Services = Mapping[str, worker_pb2.DescribeResponse]


class Restorer:
    """Restores the states of the services of a resumed run.

    Args:
        plan: Plan of the run, from its journal or a checkpoint.
        stateful: Names of the services whose state training changes.
        services: Function that returns the descriptions of the services by name.

    Attributes:
        plan: Plan of the run from the point that it goes on from, after `restoration.choose` was called.
    """

    def __init__(self, plan: Plan, stateful: Iterable[str], services: Callable[[], Services]) -> None:
        self.plan = plan
        self._stateful = set(stateful)
        self._services = services
        self._loaded: list[str] = []

    @property
    def restoration(self) -> Restoration:
        """The restoration for `Cluster.connect`."""
        return Restoration({*self._stateful, *self._point.states}, self._choose)

    def admit(self, services: Services) -> None:
        """Raises ConfigError where the services do not compute as those did that the run had at its point, or in
        other types, or do not read rows as long as those."""
        facts, now = self._point.facts, platform_of(services)
        check_platform(facts["platform"], now, elsewhere=self.plan.elsewhere)
        tables = self.plan.config.services.items()
        check_dtypes(
            dtypes_of(_dtypes(facts["config"]["services"]), facts["platform"]),
            dtypes_of(_dtypes({name: dict(table) for name, table in tables}), now),
        )
        if before := facts.get("limits"):
            readers = {name: each for name, each in services.items() if reads_tokens(each)}
            row_limits(self.plan.config, readers, before)

    def line(self) -> str:
        """Returns a line for the terminal: after which step the run goes on, and what was loaded for it."""
        held = sorted(self._stateful - set(self._loaded))
        services = f"loaded: {', '.join(self._loaded)}" if self._loaded else "nothing was loaded"
        kept = f"; held the state: {', '.join(held)}" if held else ""
        return f"resumed after step {self._point.step}; {services}{kept}"

    def changes(self) -> list[str]:
        """Returns a line for the terminal for each learning rate that differs from here on, and for an end of responses
        that may."""
        changed = self.plan.identity.resumed[-1].get("changed", {})
        lines = [
            f"{key} was {shown(there)} and is {shown(here)} from here on; a run without the change has other results"
            for key, (there, here) in changed.items()
        ]
        if RESPONSE_END not in self._point.facts and self.plan.response_end:
            lines.append(
                f"responses to conversations end with {ending(self.plan.response_end)} from here on; the checkpoint "
                "does not say how they ended before: earlier versions always took the EOS token of the tokenizer"
            )
        return lines

    @property
    def _point(self) -> ResumePoint:
        assert self.plan.resumes is not None, "the run is resumed"
        return self.plan.resumes

    def _choose(self, held: Mapping[str, str]) -> dict[str, SavedState | None]:
        """Chooses the point, and returns what services load, by name; see `Restoration`.

        Raises:
            ConfigError: Services do not hold their states after the last step, and there is no checkpoint, or config or
                services are not those of the checkpoint.
            RlhfError: A file of the checkpoint is damaged; the text names it.
        """
        others = self._others(held)
        if self._point.commit is None and not others.isdisjoint(self._stateful):
            self.plan = self.plan.at(self._checkpoint(sorted(others.intersection(self._stateful))))
            self.admit(self._services())
            others = self._others(held)
        self._loaded = sorted(others)
        point = self._point
        return {
            name: SavedState(point.place_of(name), point.states.get(name, ""))
            if name in self._stateful
            else None
            for name in self._loaded
        }

    def _others(self, held: Mapping[str, str]) -> set[str]:
        """Returns the names of the services that do not hold their state of the point."""
        states = self._point.states
        return {
            name
            for name in {*self._stateful, *states}
            if not held.get(name) or held[name] != states.get(name)
        }

    def _checkpoint(self, others: list[str]) -> ResumePoint:
        """Returns the newest checkpoint; raises ConfigError with the names of services that do not hold their states
        where there is none."""
        try:
            return ResumePoint.find(self._point.run_dir)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; services that no longer hold the state after step {self._point.step}: {', '.join(others)}"
            ) from None


def _dtypes(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the key `dtype` of the tables of services that have it, by name."""
    return {name: table["dtype"] for name, table in tables.items() if "dtype" in table}
