"""Prediction of the memory of services: bytes of a rank's device and of its host, by component and by stage of a run.

Pure functions of a model's config.json and of a service's table, without torch. docs/memory.md says what is counted, by
which sources, and how far it has been measured.
"""
