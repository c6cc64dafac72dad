"""The single controller: algorithms as straight-line code over role groups. Imports no torch."""

from rlhf.polling import poll_from_one_thread

poll_from_one_thread("client")
