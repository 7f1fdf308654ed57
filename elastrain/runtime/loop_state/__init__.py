"""State of the user's loop and model beside the parameters, which newcomers and checkpoints get."""
