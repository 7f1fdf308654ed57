"""Pipelines: members that hold some blocks each and hand activations on. Who computes which block shows in no bit.

The files here are pure: the block graph, cuts, plans, moves, what a member does next, what is done again after a loss.
`stubs/` knows torch: it records the graph of a user's model, and runs the user's whole forward on a member that holds
only some blocks.
"""
