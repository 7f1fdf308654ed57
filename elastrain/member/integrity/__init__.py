"""Parts of a member's machine that find and repair wrong results."""
