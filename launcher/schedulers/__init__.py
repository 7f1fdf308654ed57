"""Starts of jobs under the schedulers of clusters: what is written for them, as plain values."""
