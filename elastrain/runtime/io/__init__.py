"""Channels of a worker: to its agent, to its training loop, to its journal."""
