"""Where checkpoints lie: a port (`port`) and its implementations."""
