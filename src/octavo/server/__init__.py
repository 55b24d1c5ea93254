"""The HTTP face: an ASGI application with the OpenAI API over an engine client."""
