"""Stops of a node or of the whole job, by a signal or by the operator."""
