"""What is fixed for the life of a job: batches, layout, fold, placement. Pure."""
