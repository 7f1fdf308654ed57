"""One step of the user's training loop, and what ends it."""
