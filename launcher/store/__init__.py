"""The agreement of a job's nodes over etcd: the store port, its implementations, the job's keys, the agent's access."""
