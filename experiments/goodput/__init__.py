"""How much of the work of living members is kept when members are killed again and again: here and under the peers."""
