"""Collectives: their rounds, its order of summation and its arithmetic. No threads, sockets or clocks."""
