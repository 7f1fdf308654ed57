"""Faults on request, as values: the language of `elastrain inject`, of faults files and of `elastrain chaos`.

Reading order: `fault`, `table`, `grammar`, `random_faults`, `victims`. `core.fault_requests` decides which process
carries a fault out, and when.
"""
