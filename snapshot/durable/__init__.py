"""The durable tier: checkpoints on disk or in a remote store. Values, files, and decisions; nothing of the runtime.

`manifest` says what a checkpoint is, `places` where it lies, `writing` and `reading` move states, `choosing` and
`pruning` decide, `plain`, `exporting` and `importing` meet plain PyTorch. See docs/checkpoints.md.
"""
