"""States of shards and their checkpoints. Knows nothing of the runtime.

`shard_state` holds one state and packs it for the wire; `digest` computes digests; `store` keeps the copies of a member
in memory or on disk; `durable` writes and reads checkpoints.
"""
