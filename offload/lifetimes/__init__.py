"""Lifetimes: any tensor leaves memory between its uses, by a plan that knows the whole step.

`README.md` says what stands. Nothing of it is public yet: `elastrain.offload` does not name it.
"""
