"""Metrics of a run for Prometheus, and a dashboard for them."""
