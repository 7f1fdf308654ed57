"""The user's model and optimizer in flat buffers."""
