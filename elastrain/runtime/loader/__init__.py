"""The user's data loader and its processes."""
