"""The memory of pieces, on the CPU and on devices."""
