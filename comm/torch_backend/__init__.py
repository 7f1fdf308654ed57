"""The backend "elastrain" of `torch.distributed`: groups of `groups` behind torch's own calls."""
