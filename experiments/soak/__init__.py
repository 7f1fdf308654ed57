"""Mixed faults every few seconds for an hour: right to the end, and does nothing grow?"""
