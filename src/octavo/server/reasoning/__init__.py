"""How models mark the reasoning before their answer: one set of tags a family, by vLLM's names."""
