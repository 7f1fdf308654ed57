"""See ARCHITECTURE.md for what lives in this room."""
