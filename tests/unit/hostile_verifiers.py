"""Reward functions that misbehave as their row's response asks for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.reward.scorers.base import GaveUp


def obey(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """Does what the response says; else scores its length."""
    match response:
        case "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            while True:
                time.sleep(1)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("no such answer")
        case "eat memory":
            return len(bytearray(1 << 40))
        case "talk":
            print("a line on stdout")
            return float(len(sys.stdin.read()))
        case "leave a child":
            child = subprocess.Popen(["sleep", "600"])
            Path(metadata["note"]).write_text(str(child.pid))
            time.sleep(600)
        case "pid":
            return os.getpid()
        case "take a while":
            time.sleep(1.5)
        case "take a moment":
            time.sleep(0.5)
        case "spin":
            # Type checkers compute a literal 9**9**9, too.
            return pow(9, 9**9)
        case "give up":
            raise GaveUp("too_difficult")
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
    return len(response)


def verify(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> Any:
    """As `obey`, but a verifier: it reads its ground truth first."""
    return obey(prompt, response, ground_truth, metadata)


def know(prompt: str, response: str, ground_truth: str, metadata: Mapping[str, Any], *, key: str) -> float:
    """Scores 1 if the response is the key of the options."""
    return float(response == key)


def _read_truth(ground_truth: str) -> None:
    obey("", ground_truth, "", {})


verify.read_truth = _read_truth  # type: ignore[attr-defined]
