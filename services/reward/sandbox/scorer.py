"""The scorer of rewards of kind "sandbox", which runs the code grader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent import futures

from rlhf.errors import InvalidRequest, encodable
from rlhf.v1 import reward_pb2
from services.reward.sandbox.grader import REASONS, Grader, ProgramVerdict
from services.reward.sandbox.program import BadProgramRow, Submission, read_row
from services.reward.scorers.base import Scorer, metadata_of
from services.runtime.worker import CallContext
from settings.reward import SandboxTable

POLL_S = 0.1


class SandboxScorer(Scorer):
    """Scores rows by running the program in each response against the row's tests.

    A program that fails a test, crashes or exceeds a limit scores 0 (less than 1 with score "fraction"), and the
    metrics `sandbox/REASON` count it by its first reason. A row without usable tests, or whose sandbox fails, gets an
    error.

    Args:
        table: The table `sandbox` of the config.
    """

    score_range = (0.0, 1.0)

    def __init__(self, table: SandboxTable) -> None:
        self._score = table.score
        self._grader = Grader(table)

    def kind(self) -> str:
        return "sandbox"

    def close(self) -> None:
        """Waits for the programs that are running, and cancels the others."""
        self._grader.close()

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        read = [self._read(row, call) for row in rows]
        graded = [self._grader.submit(row) if isinstance(row, Submission) else None for row in read]
        self._wait({future for future in graded if future is not None}, call)
        scores, reasons = [], Counter()
        for row, future in zip(read, graded, strict=True):
            if future is None or isinstance(row, BadProgramRow):
                scores.append(reward_pb2.RowScore(error=encodable(str(row))))
                continue
            verdict = _result(future)
            reasons[verdict.reason] += 1
            scores.append(_row_score(verdict, row.score))
        self.metrics = {f"sandbox/{reason}": (reasons[reason], len(rows)) for reason in REASONS if rows}
        return scores

    def _read(self, row: reward_pb2.TextRow, call: CallContext) -> Submission | BadProgramRow:
        call.check()
        try:
            return read_row(row.prompt, row.response, row.ground_truth, metadata_of(row), self._score)
        except InvalidRequest as error:
            return BadProgramRow(str(error))
        except BadProgramRow as error:
            return error

    def _wait(self, pending: set[futures.Future[ProgramVerdict]], call: CallContext) -> None:
        """Waits for all programs. If the call should stop, cancels those that have not begun, and raises."""
        of = len(pending)
        try:
            while pending:
                call.check()
                _, pending = futures.wait(pending, POLL_S)
                call.progress(of - len(pending), of)
        finally:
            for future in pending:
                future.cancel()


def _result(future: futures.Future[ProgramVerdict]) -> ProgramVerdict:
    if (error := future.exception()) is not None:
        return ProgramVerdict(fault=f"the grader failed: {type(error).__name__}: {error}")
    return future.result()


def _row_score(verdict: ProgramVerdict, kind: str) -> reward_pb2.RowScore:
    if verdict.fault:
        return reward_pb2.RowScore(error=encodable(f"sandbox: {verdict.fault}"))
    return reward_pb2.RowScore(score=verdict.score(kind))
