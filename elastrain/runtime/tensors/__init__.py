"""The commands of a member's machine carried out on tensors."""
