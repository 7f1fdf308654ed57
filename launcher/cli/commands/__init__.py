"""Commands of `elastrain`, one file each."""
