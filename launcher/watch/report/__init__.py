"""The report of a run as one HTML page: its history read from the run's folder, and drawn without a script."""
