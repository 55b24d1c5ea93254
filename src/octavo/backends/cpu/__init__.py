"""Runs graphs on CPUs: lowering to records, and the native executor (csrc/)."""
