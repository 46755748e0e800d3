"""The pytest plugin: tests that record their own training loop, and budgets that it must keep."""
