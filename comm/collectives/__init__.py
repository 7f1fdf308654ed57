"""Collectives: rounds, order of summation and arithmetic. No threads, sockets or clocks."""
