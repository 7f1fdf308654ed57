"""Verification and copying of shard state: digests, packed states. Knows nothing of the runtime."""
