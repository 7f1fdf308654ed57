"""The devices that take spilled bytes, behind one port. See `port.py`."""
