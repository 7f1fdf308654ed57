"""Durable checkpoints on disk or in a remote store: values, files and decisions. Knows nothing of the runtime.

`manifest` describes a checkpoint, and `places` reaches the media. `state_file` and `tensor_sections` define the file
format; `writing`, `publishing` and `reading` use it. `owner` keeps two jobs apart. `retention` chooses which checkpoint
to resume from, and which to remove. `plain` and `conversion` convert from and to plain PyTorch. See
docs/checkpoints.md.
"""
