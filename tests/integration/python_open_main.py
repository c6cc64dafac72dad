"""A script that opens a run, uses its reward on two threads, and ends in the way that it is told."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from controller.api import FutureBatch, Run, open_run


def score(opened: Run) -> None:
    rows = FutureBatch.of(prompt=["1+1=", "1+2="], response=["2", "2"], ground_truth=["2", "3"])
    scored = opened.reward().compute_reward(rows)
    print(opened.fetch(scored, "rewards")["rewards"].tolist(), flush=True)


def main(config: str, ending: str) -> None:
    if ending in ("raise", "wait"):
        with open_run(config, launch=True) as opened:
            score(opened)
            if ending == "raise":
                raise ValueError("an error of the script")
            threading.Event().wait()
    # The services outlive the thread that started them.
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(open_run, config, launch=True).result()
    score(opened)
    if ending == "close":
        opened.close()
        opened.close()
        with open_run(config, launch=True) as again:
            score(again)


if __name__ == "__main__":
    main(*sys.argv[1:])
