"""The same model, data and step without elastrain: a plain loop, DDP, and DDP with ZeroRedundancyOptimizer."""
