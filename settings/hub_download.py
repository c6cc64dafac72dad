"""Downloads a model from the Hugging Face hub into the cache, in a process of its own, which can be ended at any time.

Usage: `python -m settings.hub_download NAME REVISION PARENT PATTERN...`. Prints the directory of the files, or exits
with status 1 after a text that says why there is none, to follow "the model X on the hub". Ends with the process
PARENT, which has started it.
"""

from __future__ import annotations

import sys

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from rlhf.parent import ends_with


def why(error: Exception, name: str, revision: str) -> str:
    """Returns one line that says why a model could not be downloaded."""
    hub = constants.ENDPOINT
    match error:
        case errors.GatedRepoError():
            return f"is gated: ask for access at {hub}/{name} and set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"cannot be read: {name} has no revision {revision!r}"
        case errors.RepositoryNotFoundError():
            return (
                f"cannot be read: {hub} has no {name}, or shows it only to those whose HF_TOKEN may read it"
            )
        case errors.LocalEntryNotFoundError():
            cause = error.__cause__ or error
            is_off = isinstance(cause, errors.OfflineModeIsEnabled)
            reason = "HF_HUB_OFFLINE is set" if is_off else f"{hub} cannot be reached ({_first_line(cause)})"
            return f"is not in the cache {constants.HF_HUB_CACHE}, and {reason}"
        case _:
            return f"cannot be read: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def main() -> None:
    name, revision, parent, *files = sys.argv[1:]
    if not ends_with(int(parent)):
        sys.exit(1)
    disable_progress_bars()
    try:
        print(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # noqa: BLE001 - told to the process that has started this one
        print(why(error, name, revision))
        sys.exit(1)


if __name__ == "__main__":
    main()
