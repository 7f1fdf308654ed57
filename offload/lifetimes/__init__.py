"""Training within a memory limit: any tensor can leave memory between its uses, by a plan of the whole step.

`README.md` describes the parts. No name here is public yet: `elastrain.offload` does not export them.
"""
