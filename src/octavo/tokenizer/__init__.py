"""Text to token ids and back, and messages to text."""
