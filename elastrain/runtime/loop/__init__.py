"""One step of the user's training loop: runs, pipeline actions, checks of the script, and reports of its end."""
