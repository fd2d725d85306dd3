"""What people see of a run: progress, tables, charts, the report."""
