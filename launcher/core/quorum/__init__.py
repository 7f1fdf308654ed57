"""Decisions about the job's own etcd quorum: how it is founded, and who is a member. No I/O and no clock."""
