"""The thread that drives a member's machine."""
