"""Hosts simulated by network namespaces on one machine, connected to one bridge, and network faults between them."""
