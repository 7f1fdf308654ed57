"""Start of a job, and of its further lives after it has lost its state."""
