"""The memory that pieces lie in, on the CPU and on devices."""
