"""Adapters with which scripts of other training libraries train in a job. Each is a module that a script imports."""
