"""Shared memory of the processes of one host, and the proof that one of them has ended. Knows no member, no socket."""
