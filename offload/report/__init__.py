"""Reports and pictures of what offloading did, or would do."""
