"""Connections between the agents of several nodes."""
