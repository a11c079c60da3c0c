"""Suites that every index, every source of records and every cluster must pass; a test file inherits one."""
