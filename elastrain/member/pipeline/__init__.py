"""Parts of a member's machine for pipelines: tasks and replicas of blocks."""
