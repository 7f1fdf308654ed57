"""Models that we did not write, out of configurations of `transformers`, under kills."""
