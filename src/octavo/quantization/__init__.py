"""Formats of stored weights: how many bytes a row takes and what numbers the bytes mean."""
