"""The communicator against Gloo, through torch.distributed on both sides."""
