"""Values that are fixed for the life of a job: batches, layout, summation tree, placement. Pure."""
