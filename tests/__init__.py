"""Tests. Every process of them, and what it starts, keeps what it has compiled.

Where the environment forbids that, each of them compiles all modules anew, and pytest rewrites those of tests anew:
some ten seconds of a core each time.
"""

import os
import sys

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
