"""The version, in a file of its own: packaging reads it, and what needs it imports no package for it."""

__version__ = "0.2.0"
