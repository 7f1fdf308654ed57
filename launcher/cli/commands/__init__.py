"""One file per command of `elastrain`."""
