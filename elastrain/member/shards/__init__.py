"""Parts of a member's machine that hold shards: primaries, backups, copies, reduction."""
