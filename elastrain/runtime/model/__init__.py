"""The user's model and optimizer in flat buffers: partition, gradients, running statistics, sharded updates."""
