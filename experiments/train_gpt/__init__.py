"""A small GPT on the source text of the Python standard library."""
