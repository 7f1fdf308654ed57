"""Options of `elastrain run` in groups. Each file has the flags of one subject, checks them, and makes values."""
