"""States of shards: what they are and how they travel (`state`), their digests (`digest`), their copies in memory
(`store`) and on disk (`durable`). Knows nothing of the runtime.
"""
