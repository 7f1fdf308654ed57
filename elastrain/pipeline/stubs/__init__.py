"""The part of pipelines that knows torch: the tracing pass, and stubs for blocks that a member does not hold.

Every member runs the user's whole forward and loop body on the real batch. Blocks that others hold return fakes; what
crosses a cut comes in and goes out at the entries of blocks, so that the user's code needs no change.
"""
