"""The dimensions of a decoder-only transformer, read from GGUF metadata or from config.json. Knows no graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.core.errors import ModelFileError, shorten
from octavo.models.files import ModelFiles
from octavo.models.rope import RopeFrequencies, RopeSettings, rope_frequencies
from octavo.models.settings import MAX_INT, Settings

MAX_HEAD_DIM = 4096  # far above any model's: a damaged file must not become gigabytes of rotation frequencies
NO_ROPE = RopeFrequencies(())


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The dimensions that nearly every decoder has. `read` takes them from either kind of file; a family replaces what
    it keeps elsewhere.

    windows: for each layer, the positions that it attends to, 0 for all.
    interleaved: which pairs are rotated (schema.Rope).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    tied_embeddings: bool
    rope: RopeFrequencies
    interleaved: bool
    windows: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def read(
        cls,
        files: ModelFiles,
        *,
        interleaved_in_gguf: bool = False,
        tied_by_default: bool = False,
        default_theta: float = 10000.0,
        default_eps: float = 1e-6,
        rotary_share: float = 1.0,
        rotates: bool = True,
    ) -> DecoderConfig:
        """interleaved_in_gguf: llama.cpp's converter has reordered q and k of this family. rotates: False for a family
        without rotary positions. The others are the values of config.json entries that may be absent. Raises
        ModelFileError for what is missing, malformed or unsupported.
        """
        if files.kind == "gguf":
            return cls._read_gguf(files, interleaved_in_gguf, rotates)
        read = settings(files)
        read.refuse_unless("is_encoder_decoder", False)
        read.refuse_unless("add_cross_attention", False)
        hidden = read.positive_int("hidden_size", "n_embd")
        heads = read.positive_int("num_attention_heads", "n_head")
        layers = read.positive_int("num_hidden_layers", "n_layer", "num_layers", at_most=len(files.shapes))
        head_dim = read.positive_int("head_dim", default=max(1, hidden // heads), at_most=MAX_HEAD_DIM)
        length = read.positive_int("max_position_embeddings", "n_positions", "n_ctx")
        rope = read_rope(files, read, head_dim, default_theta, rotary_share) if rotates else NO_ROPE
        return cls(
            vocab_size=read.positive_int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive_int(
                "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden
            ),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.positive_int("num_key_value_heads", "num_kv_heads", default=heads),
            head_dim=head_dim,
            norm_eps=read.positive_float(
                "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", default=default_eps
            ),
            max_position_embeddings=min(int(length * max(1.0, rope.stretched)), MAX_INT),  # positions have 32 bits
            tied_embeddings=read.flag("tie_word_embeddings", default=tied_by_default),
            rope=rope,
            interleaved=False,
            windows=(0,) * layers,
        )

    @classmethod
    def _read_gguf(cls, files: ModelFiles, interleaved: bool, rotates: bool) -> DecoderConfig:
        read = settings(files)
        read.refuse_unless("attention.causal", True)
        heads = read.positive_int("attention.head_count")
        hidden = read.positive_int("embedding_length")
        layers = read.positive_int("block_count", at_most=len(files.shapes))
        head_dim = read.positive_int("attention.key_length", default=max(1, hidden // heads), at_most=MAX_HEAD_DIM)
        read.refuse_unless("attention.value_length", head_dim)
        return cls(
            vocab_size=_vocab_size(files),
            hidden_size=hidden,
            intermediate_size=read.positive_int("feed_forward_length", "expert_feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=read.positive_int("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            norm_eps=read.positive_float("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
            max_position_embeddings=read.positive_int("context_length"),
            tied_embeddings="output.weight" not in files.shapes,
            rope=read_rope(files, read, head_dim) if rotates else NO_ROPE,
            interleaved=interleaved,
            windows=(0,) * layers,
        )


def settings(files: ModelFiles) -> Settings:
    return Settings(files.config, f"{files.config['general.architecture']}." if files.kind == "gguf" else "")


def with_defaults(files: ModelFiles, **defaults: object) -> ModelFiles:
    """The same, with the values of entries that the family's config.json may leave out. (null is not left out.)"""
    return files if files.kind == "gguf" else replace(files, config={**defaults, **files.config})


def layer_windows(
    read: Settings, num_layers: int, slides: Callable[[int], bool] = lambda layer: True
) -> tuple[int, ...]:
    """For each layer, the positions that it attends to, 0 for all. slides: which layers have the window where
    layer_types does not say.
    """
    window = read.whole("sliding_window", "attention.sliding_window", default=0)
    if not read.flag("use_sliding_window", default=True):
        window = 0
    default = ["sliding_attention" if slides(layer) else "full_attention" for layer in range(num_layers)]
    kinds = read.items("layer_types", length=num_layers) if read.has("layer_types") else default
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ModelFileError(
            f"{read.path}layer_types has {shorten(repr(unknown[0]))}; only full_attention and sliding_attention are "
            "supported yet"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_rope(
    files: ModelFiles, read: Settings, head_dim: int, default_theta: float = 10000.0, rotary_share: float = 1.0
) -> RopeFrequencies:
    """The model's rotation, or that of its full_attention layers where those that slide have another. config.json
    describes it by rope_parameters, or by rope_theta and rope_scaling.
    """
    if files.kind == "hf":
        here = read.section("rope_parameters")
        here = here.section("full_attention") if here.has("full_attention") else here
        return hf_rope(files, read, here, head_dim, default_theta, rotary_share)
    scaling = read.section_of_prefix("rope.scaling.")
    kind = scaling.text("type", default="none")
    factor = read.positive_float("rope.scale_linear", default=1.0)  # what older files call the factor
    if factor != 1.0:
        kind, scaling = "linear", Settings({"factor": factor}, path=f"{read.path}rope.scaling.")

    def factors(name: str) -> Sequence[float] | None:
        tensor = "rope_freqs.weight" if name == "freqs" else f"rope_factors_{name}.weight"
        return files.read_values(tensor) if tensor in files.shapes else None

    length = read.positive_int("context_length")
    if kind == "none" and factors("long") is not None:
        kind = "longrope"
    return rope_frequencies(
        RopeSettings(
            rotary_dim=read.positive_int("rope.dimension_count", default=head_dim, at_most=head_dim),
            theta=read.positive_float("rope.freq_base", default=default_theta),
            kind="default" if kind == "none" else kind,
            scaling=scaling,
            factors=factors,
            max_position_embeddings=length,
            wanted_length=files.wanted_length,
        )
    )


def hf_rope(
    files: ModelFiles, read: Settings, here: Settings, head_dim: int, default_theta: float, rotary_share: float
) -> RopeFrequencies:
    """here: rope_parameters, or the part of them for one kind of layers; rope_scaling is what older files have."""
    old = read.section("rope_scaling")
    length = read.positive_int("max_position_embeddings", "n_positions", "n_ctx", default=2048)
    scaling = here if here.has("rope_type", "type") else old
    original = read.positive_int("original_max_position_embeddings", default=length)  # Phi-3 keeps it outside
    scaling = scaling.with_default("original_max_position_embeddings", original)
    share = here.positive_float(
        "partial_rotary_factor",
        default=read.positive_float("partial_rotary_factor", "rotary_pct", "rope_pct", default=rotary_share),
    )
    kind = scaling.text("rope_type", "type", default="default")
    theta = read.positive_float("rope_theta", "rotary_emb_base", default=default_theta)

    def factors(name: str) -> Sequence[float] | None:
        key = f"{name}_factor"
        return scaling.numbers(key) if scaling.has(key) else None

    return rope_frequencies(
        RopeSettings(
            rotary_dim=max(1, int(head_dim * min(1.0, share))),
            theta=here.positive_float("rope_theta", default=theta),
            kind={"su": "longrope", "mrope": "default"}.get(kind, kind),
            scaling=scaling,
            factors=factors,
            max_position_embeddings=length,
            wanted_length=files.wanted_length,
        )
    )


def _vocab_size(files: ModelFiles) -> int:
    """Rows of the embedding matrix: one for each token of the file's vocabulary, and perhaps padding."""
    shape = files.shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise ModelFileError(f"token_embd.weight is {shape}; a matrix [vocab_size, hidden_size] is needed")
    tokens = files.config.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > shape[0]:
        raise ModelFileError(
            f"the vocabulary has {len(tokens):,} tokens, but token_embd.weight has {shape[0]:,} rows: "
            "convert the model again"
        )
    return shape[0]
