"""Shared memory between the processes of one host, and proof that one of them has ended; no members, no sockets."""
