"""The backend "elastrain" of `torch.distributed`: this package's groups behind torch's own calls."""
