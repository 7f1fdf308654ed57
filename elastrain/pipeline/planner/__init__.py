"""The planner: the profile of a job, a timeline that predicts the seconds of a step, and the choice of the next plan.

All modules are pure. Seconds and bytes come in as values, so every decision can be repeated from its input.
"""
