"""Loggers of a job: what `job.log` is given goes into their files, written by one member."""
