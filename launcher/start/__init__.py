"""The start of a job, and its restarts."""
