"""Plans that say when which piece leaves memory, and the profiles that plans are computed from. Pure."""
