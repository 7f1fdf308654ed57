"""Choice of checks and audits, and arbitration when results differ. Pure."""
