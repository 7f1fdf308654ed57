"""The memory limit of a worker at run time."""
