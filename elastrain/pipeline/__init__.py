"""Pipelines: members that hold some blocks each and pass activations on. The split never changes a bit of the result.

The modules of this folder are pure: block graph, cuts, plans, a member's next action, and what is recomputed after a
loss. `stubs/` depends on torch: it records the graph of a user's model, and runs the user's whole forward on a member
that holds only some blocks.
"""
