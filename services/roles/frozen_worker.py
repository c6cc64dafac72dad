"""Worker of a role whose model is in a training engine and is not trained."""

from __future__ import annotations

from typing import Any

from rlhf.errors import Refused
from rlhf.v1 import worker_pb2
from services.models.loading import Load
from services.roles.model_worker import ModelWorker
from services.runtime.ranks import Ranks, known_to_all
from services.runtime.worker import CallContext, CallResult, CallRows, register
from settings.model import ModelTable


class FrozenModelWorker(ModelWorker):
    """Worker of a model that is not trained, so that several sessions may share it.

    They all use the weights of the model directory. A session that is alone may load a checkpoint or offload the model,
    and then others are refused until it has ended.

    Args:
        table: Table of the service.
        ranks: Ranks of the service.
        load: Loads the role's model from a directory in a dtype.
    """

    is_frozen = True

    def __init__(self, table: ModelTable, ranks: Ranks, load: Load) -> None:
        super().__init__(table, ranks, load, None)
        self._changed_by: str | None = None

    @register("ONE_TO_ALL")
    def begin_session(
        self, rows: CallRows, request: worker_pb2.BeginSessionRequest, call: CallContext
    ) -> CallResult:
        """Implements BeginSession: loads the model directory, unless other sessions use the weights as they are there.

        Raises:
            Refused: Another session has loaded a checkpoint or offloaded the model, and has not ended; or it has ended,
                but others still use the weights that it has left, and the request does not keep them.
        """
        changed, shared = self.ranks.total(
            [self._changed_by in call.others, bool(call.others)], call.peers_deadline
        )
        if changed or (shared and self._changed_by is not None and not request.keep_weights):
            raise known_to_all(
                Refused(f"session {self._changed_by!r} has loaded a checkpoint here or offloaded the model")
            )
        if shared and self._changed_by is None:
            request.keep_weights = True
        begun = super().begin_session(rows, request, call)
        if not request.keep_weights:
            self._changed_by = None
        return begun

    @register("ONE_TO_ALL")
    def offload(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self._change(call)
        return super().offload(rows, request, call)

    @register("ONE_TO_ALL")
    def load_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self._change(call)
        return super().load_checkpoint(rows, request, call)

    def _change(self, call: CallContext) -> None:
        """Notes that a call changes the weights or moves them. Collective.

        Raises:
            Refused: Other sessions use the weights.
        """
        (shared,) = self.ranks.total([bool(call.others)], call.peers_deadline)
        if shared:
            raise known_to_all(
                Refused(f"other sessions use this {self.role}, so its weights stay as they are")
            )
        self._changed_by = call.call.session
