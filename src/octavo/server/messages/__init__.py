"""Anthropic's Messages API on top of the chat route: bodies, conversation, content blocks, events."""
