"""Durable checkpoints of a running job: states captured by the engine, written by a thread of low priority."""
