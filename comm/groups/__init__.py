"""Groups of members, and what executes their operations: in shared memory on one host, by messages between hosts."""
