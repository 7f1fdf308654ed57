"""The job's own etcd quorum: certificates, the founding among hosts, the etcd member, and the thread that keeps it."""
