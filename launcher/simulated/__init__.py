"""Nodes simulated on one machine, with their etcd and network."""
