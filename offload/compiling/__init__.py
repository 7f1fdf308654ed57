"""The backend for `torch.compile` whose programs spill the values that they save for backward."""
