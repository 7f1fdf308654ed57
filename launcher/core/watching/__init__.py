"""Facts about a running job that no decision needs, kept for the commands that show the job."""
