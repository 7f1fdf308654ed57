"""The runtime of a worker: the user's API, the training loop, the engine thread, and what they work on."""
