"""The engine thread, which drives a member's machine, and the rules for its timing."""
