"""Failing on purpose, from inside a worker, in a job that was started with `--inject`.

`armed` waits for the place of each fault, `actions` says what a class does there; `slowness`, `device` and the others
are what they do it with. Whom a fault strikes is decided by the agents.
"""
