"""The single controller: algorithms as straight-line code over role groups. Imports no torch."""
