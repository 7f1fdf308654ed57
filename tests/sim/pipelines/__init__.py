"""Members of pipelines under one seeded scheduler, with symbols for activations, gradients and parameters."""
