"""The books of one member: which memory holds what. `ledger.BufferBook` carries the machine's commands out over them.

The arithmetic is a port (`ports`): tensors in a worker, symbols in the simulator. Called by one thread only.
"""
