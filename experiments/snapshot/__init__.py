"""What snapshots and checkpoints cost, and what they catch."""
