"""The memory limit of a worker at run time: measurements, needs of the plan, and decisions carried out."""
