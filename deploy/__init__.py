"""Launchers of services, ready configurations and the quickstart task."""
