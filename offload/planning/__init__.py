"""Plans of what leaves memory when, and the profiles that they are made of. Pure."""
