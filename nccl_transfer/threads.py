"""Pool of threads on which independent jobs run in parallel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Threads that are kept for later jobs. A job gets an idle thread or a new one, so that jobs that hang, such as
    reads from a rank that does not answer, delay no other. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[ThreadPoolExecutor] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def run_all(self, jobs: Sequence[Callable[[], T]], most: int) -> list[T]:
        """Runs jobs in parallel and returns their results in order. They begin in order, at most `most` at a time.
        Raises the first error without waiting for the other jobs; those that have not begun do not run. A single job
        runs on the calling thread."""
        if len(jobs) <= 1:
            return [job() for job in jobs]
        waiting, results = deque(enumerate(jobs)), dict[int, T]()

        def run_in_turn() -> None:
            while waiting:
                try:
                    number, job = waiting.popleft()
                except IndexError:
                    return  # another thread took the last one
                results[number] = job()

        try:
            for ended in as_completed([self._submit(run_in_turn) for _ in range(min(most, len(jobs)))]):
                ended.result()
        except BaseException:
            waiting.clear()
            raise
        return [results[number] for number in range(len(jobs))]

    def close(self) -> None:
        """Ends the threads, those that run a job after it."""
        with self._lock:
            self._is_closed, idle, self._idle = True, self._idle, []
        for thread in idle:
            thread.shutdown(wait=False)

    def _submit(self, job: Callable[[], None]) -> Future[None]:
        with self._lock:
            thread = self._idle.pop() if self._idle else ThreadPoolExecutor(1, self._name)
        return thread.submit(self._run, job, thread)

    def _run(self, job: Callable[[], None], thread: ThreadPoolExecutor) -> None:
        try:
            job()
        finally:
            # Before the result is there, so that the next call finds the thread idle.
            with self._lock:
                if self._is_closed:
                    thread.shutdown(wait=False)
                else:
                    self._idle.append(thread)
