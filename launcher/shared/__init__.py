"""Values and small tools that all parts of the launcher use."""
