"""Reading a peer's ordinary tensor in place, or having it staged in shared memory: which costs less?"""
