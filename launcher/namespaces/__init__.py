"""Hosts on one machine: network namespaces, each plugged into one bridge, and what can go wrong between them."""
