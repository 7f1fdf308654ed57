"""Decisions that all members make alike from the same reports. Pure."""
