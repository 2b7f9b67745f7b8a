"""The `dspark` command."""
