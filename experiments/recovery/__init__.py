"""What a loss costs the members that are left."""
