"""POST /v1/responses and what belongs to it: OpenAI's Responses API over the same conversations as chat."""
