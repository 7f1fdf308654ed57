"""Faults on request: the words of `elastrain inject`, of faults files and of `elastrain chaos`, as values.

Reading order: `fault`, `table`, `grammar`, `chaos`. Who carries a fault out, and when, `core.fault_requests` decides.
"""
