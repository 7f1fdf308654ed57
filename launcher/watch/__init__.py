"""Views of a job for people: one screen, lines, a report page, metrics, and the checks before a start."""
