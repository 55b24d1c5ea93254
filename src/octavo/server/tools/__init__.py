"""How models write tool calls into their text: one small parser a format, by vLLM's names."""
