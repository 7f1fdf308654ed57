"""Memory of a member: its budget, its peak, and what has to move to disk. Pure."""
