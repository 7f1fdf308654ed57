"""The part of pipelines that depends on torch: the tracing pass, and stubs for blocks that a member does not hold.

Every member runs the user's whole forward and loop body on the real batch. Blocks of other members return fakes.
Boundary tensors are received and sent at the entries of blocks, so the user's code needs no change.
"""
