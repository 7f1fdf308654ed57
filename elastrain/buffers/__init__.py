"""Buffers of one member: gradient slots, folds, shard states. `BufferBook` carries the machine's commands out.

All arithmetic goes through a port (`port`): tensors in a worker, symbols in the simulator. One thread calls all of it.
"""
