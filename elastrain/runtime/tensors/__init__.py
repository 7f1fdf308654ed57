"""Execution of the commands of a member's machine on tensors."""
