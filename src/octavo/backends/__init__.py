"""Executors of graphs. None of them knows another."""
