"""The role services: what torchrun starts, one process per rank."""

from rlhf.polling import poll_from_one_thread

poll_from_one_thread("listener")
