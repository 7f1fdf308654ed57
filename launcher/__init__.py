"""See docs/index.md for what lives in this room."""
