"""The options of `elastrain run`, in groups: each file has the flags of one subject, checks them, and makes values."""
