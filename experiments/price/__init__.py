"""What elasticity costs when nothing fails."""
