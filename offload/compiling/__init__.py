"""Compiled programs: what a graph saves for its backward goes out and comes back by operators inside it."""
