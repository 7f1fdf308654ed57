"""State of the user's loop and model besides the parameters. Newcomers and checkpoints get it."""
