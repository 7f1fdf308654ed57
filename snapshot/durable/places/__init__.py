"""Places where checkpoints lie: an interface (`port`), and implementations for disks, remote stores and other nodes."""
