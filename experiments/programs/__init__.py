"""Ordinary training programs, each run in many ways that must come to the same."""
