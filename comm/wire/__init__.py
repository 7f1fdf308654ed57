"""Authenticated links between members: frames on streams, the handshake before them, and the mesh that holds them."""
