"""What a job agrees upon over etcd: the store port, what implements it, the job's keys, the agent's access to them."""
