"""Activations that are saved for the backward and leave memory: `save_on_disk`."""
