"""Nodes that are simulated on one machine."""
