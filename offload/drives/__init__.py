"""Devices that take spilled bytes: engines behind one port (`port.py`), queues, checksums, and the residency table."""
