"""Reply bodies of the OpenAI API, with vLLM's extra fields: shapes only."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]


class CallFunction(Struct):
    name: str
    arguments: str = ""  # JSON text


class ToolCall(Struct):
    id: str
    function: CallFunction
    type: str = "function"


class ChatMessage(Struct):
    """The reasoning goes by both the names that vLLM has had for it."""

    content: str | None
    role: str = "assistant"
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # of each token by token id; of the first there are none


class ChatReply(Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CallFunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The next piece of a call; id, type and name come with its first one only."""

    index: int
    function: CallFunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """Of a whole reply, or of one chunk of a streamed one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    seed: int | UnsetType = UNSET


class CompletionReply(Struct, kw_only=True):
    """A whole reply, or one chunk of a streamed one (the OpenAI API gives both the same shape)."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"
