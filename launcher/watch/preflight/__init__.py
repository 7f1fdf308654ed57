"""Checks of a machine before a job starts: each says what was found, and what to do if it would stop a job."""
