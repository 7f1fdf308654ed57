"""What people see first."""
