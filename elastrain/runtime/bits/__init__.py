"""The answers of `elastrain doctor`, which `prepare` makes instead of joining a job."""
