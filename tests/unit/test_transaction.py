"""The steps of a two-sided transfer: which may follow which, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_transfer.transports.gpu.transaction import Phase, Transaction
from rlhf.errors import Refused

STEPS: dict[str, Callable[[Transaction], None]] = {
    "prepare": lambda transaction: transaction.prepare(),
    "commit": lambda transaction: transaction.commit("plan", 1),
    "finish": lambda transaction: transaction.finish(),
    "abort": lambda transaction: transaction.abort("because"),
}

LEGAL = {
    (Phase.IDLE, "prepare"): Phase.PREPARED,
    (Phase.PREPARED, "commit"): Phase.COMMITTED,
    (Phase.COMMITTED, "finish"): Phase.DONE,
    (Phase.IDLE, "abort"): Phase.ABORTED,
    (Phase.PREPARED, "abort"): Phase.ABORTED,
    (Phase.COMMITTED, "abort"): Phase.ABORTED,
    (Phase.ABORTED, "abort"): Phase.ABORTED,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
def test_a_step_is_taken_where_it_is_legal_and_refused_elsewhere(phase: Phase, step: str) -> None:
    transaction = Transaction("plan", 1, phase)
    if (phase, step) in LEGAL:
        STEPS[step](transaction)
        assert transaction.phase is LEGAL[phase, step]
    else:
        with pytest.raises(Refused, match=rf"plan plan of communicator 1 is {phase.name.lower()}; it cannot"):
            STEPS[step](transaction)
        assert transaction.phase is phase


@given(st.lists(st.sampled_from(sorted(STEPS))))
def test_whatever_is_tried_the_transfer_never_goes_back(steps: list[str]) -> None:
    transaction, order = Transaction("plan", 1), list(Phase)
    for step in steps:
        before = transaction.phase
        try:
            STEPS[step](transaction)
        except Refused:
            assert transaction.phase is before
        assert order.index(transaction.phase) >= order.index(before)
        assert not before.over or transaction.phase is before


@pytest.mark.parametrize(("plan", "epoch"), [("another", 1), ("plan", 2), ("plan", 0)])
def test_only_what_was_prepared_is_committed(plan: str, epoch: int) -> None:
    transaction = Transaction("plan", 1, Phase.PREPARED)
    with pytest.raises(Refused, match=rf"plan {plan} of communicator {epoch} was not prepared"):
        transaction.commit(plan, epoch)
    assert transaction.phase is Phase.PREPARED


def test_the_first_reason_for_an_abort_is_told() -> None:
    transaction = Transaction("plan", 1)
    transaction.abort("the deadline")
    transaction.abort("something later")
    with pytest.raises(Refused, match="is aborted: the deadline; it cannot become prepared"):
        transaction.prepare()
