"""The command line of elastrain: its commands and their options."""
