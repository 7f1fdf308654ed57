"""Fault injection from inside a worker, in a job that was started with `--inject`.

`armed` waits for the place of each fault, and `fault_actions` says what each class does there. `broken_parts` and
`flips` are its tools. The agents choose the worker that a fault strikes.
"""
