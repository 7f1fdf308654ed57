"""The launcher: the processes behind the command `elastrain`. See docs/index.md for its folders."""
