"""Decisions about the places of a job: which nodes compute, which wait as spares, and which are quarantined."""
