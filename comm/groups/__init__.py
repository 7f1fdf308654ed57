"""Groups of members, and executors of their collectives: shared memory on one host, messages between hosts."""
