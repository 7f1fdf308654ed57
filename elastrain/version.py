"""The version, in a file of its own: packaging reads it without importing the package."""

__version__ = "0.2.0"
