"""Carrying: what travels between members of a job on a device, and what the device still has to finish."""
