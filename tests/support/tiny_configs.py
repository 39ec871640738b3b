"""Tiny configurations of transformers' models, made from their configuration classes by the names
of their fields.

Whatever has a name that means a size is cut down to the size below, in nested configurations too;
everything else keeps its default. If layers are of several types, there is one of each. Dropping
whole layers and masking spectra are off: both decide by random numbers what is computed.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

# below the first token of a text: whatever has a meaning of its own
VOCABULARY, FIRST_TOKEN, END = (96, 48, 2)
IMAGE = 32

# The first expression that matches the whole name of a field gives its largest value.
CAPS: tuple[tuple[str, float], ...] = (
    (r".*(token_id|token_index|_idx|_ids|_index|_indices|_indexes)", float("inf")),
    (r"type_vocab_sizes?|n_langs", 4),
    (r".*codebook_size", 64),
    (r"feature_projection_input_dim|context_size", 16),
    (r".*vocab_size.*|num_embeddings|num_embeds|.*vocab|ngram_vocab_size_base", VOCABULARY),
    (
        r"max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length|model_max_length",
        64,
    ),
    (
        r".*sliding_window(_size)?|local_attention|attention_window(_size)?|attention_chunk_size|keep_window_size",
        8,
    ),
    (
        r".*(layer_pattern|window_pattern|every_n_layers|layer_period|layer_interval|sparse_step|layer_step)",
        2,
    ),
    (
        r"(layer_group_size|layers_block_freq|attn_layer_offset|expert_layer_offset|cross_layer_interval)",
        1,
    ),
    (r"num_hidden_groups|inner_group_num|num_res_blocks|num_conv_layers|num_adapter_layers", 1),
    (
        r".*(num_|n_|encoder_|decoder_|hidden_)?layers(_per_stack)?|n_layer|depth|depths|.*num_hidden_layers",
        2,
    ),
    (
        r"num_blocks|num_block_repeats|stage_num(b_of)?_?(blocks|layers)|block_sizes|resampler_depth|repeats",
        1,
    ),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|num_kv_shared_layers", 1),
    (r"num_experts_per_tok(en)?|moe_top_?k|num_selected_experts|topk_group|moe_k", 2),
    (r"n_groups?|num_expert_group", 2),
    (r"(moe_)?num_shared_experts|n_shared_experts", 1),
    (r".*experts|moe_num_experts|zero_expert_num|expert_capacity", 4),
    (r".*(num_|n_)(key_value|kv|query)_?(heads|groups)|kv_n_heads", 2),
    (r".*(heads|n_head|num_heads|heads_per_ngram|conv_pos_embedding_groups|head)", 4),
    (r"rotary_dim", 4),
    (r"qk_head_dim", 16),
    (r".*(head_dim|d_kv|d_head|dim_head|head_size|headdim|kv_channels|key_dim)", 8),
    (r".*(lora_rank|rank|d_rel|dt_rank|time_step_rank)", 8),
    (r"index_topk(_blocks)?", 8),
    (r".*(state_size|d_state|num_mem_blocks)", 8),
    (r".*(chunk_size|chunk_length|block_size|segment_means_seq_len|num_landmarks)", 8),
    (r".*(num_buckets|rel_.*_bins|max_rel.*pos|max_distance|relative_positions?)", 16),
    (r".*num_conv_pos_embeddings|.*pos_emb_(height|width)|num_position_embeddings", 16),
    (r"embed_dim", 16),
    (r".*image_size|crop_size|resolution|img_size", IMAGE),
    (r"patch_size", 8),
    (r"window_size", 4),
    (r"upsample_groups|groups_width", 4),
    (r".*(num_mel_bins|mel_dim|feature_size|feat_per_channel|n_mel_bins|input_feat_size)", 16),
    (
        r".*(intermediate|ffn|ff|feedforward|feed_forward|inner|mlp)(_hidden)?_?(dim|size|mlp|hidden_size)",
        64,
    ),
    (r"d_ff|n_inner|dff|dim_ff|d_inner|mamba_d_ssm|lru_width|projector_hidden_size", 64),
    (
        r".*(hidden_size|hidden_dim|embed_?dims?|emb_dim|embed_size|embedding_size|embedding_dim|proj_embed_dim)",
        32,
    ),
    (
        r"(d_model|n_embd|dim|emb_dim|proj_size|d_latents|width|embedding_rank|hidden_size_.*|hidden_sizes)",
        32,
    ),
    (
        r".*(output_dim|out_dim|in_dim|input_dim|projection_dim|projection_size|classifier_proj_size|codevector_dim)",
        32,
    ),
    (
        r"conv_dim|tdnn_dim|.*conv_channels|attention_hidden_size|base_channels|latent_channels|neck_hidden_sizes",
        32,
    ),
    (
        r".*(query_tokens|num_latents|image_tokens|tokens_per_image|query_num|num_queries|num_negatives)",
        4,
    ),
)
_ALTERNATING = ["sliding_attention", "full_attention"]
COMBINED = (
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "layers_block_type",
    "block_types",
    "attn_layers",
)
_BEGIN = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "decoder_start_token_id": 1,
    "sep_token_id": 2,
}


_SHIFTED = {"depths": (2, 1), "num_heads": (2, 4)}  # with and without windows to shift
# What a class without these values cannot do; no rule by name would say it.
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {"attn_layer_indices": [1]},
    "cvt": {"depth": [1, 1, 1], "num_heads": [1, 2, 4], "embed_dim": [8, 16, 32]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bit": {"num_groups": 4, "embedding_size": 8},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "esm": {"vocab_size": VOCABULARY},
    "esmc": {"vocab_size": VOCABULARY},
    "hgnet_v2": {
        "hidden_sizes": [32] * 4,
        "stage_in_channels": [48, 32, 32, 32],
        "stage_out_channels": [32] * 4,
    },
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {"patch_size": 16},
    **{
        name: {"image_grid_pinpoints": [[IMAGE, IMAGE]]}
        for name in ("llava_next", "llava_next_video", "llava_onevision")
    },
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevitv2": {"image_size": 64},
    "mpnet": {"relative_attention_num_buckets": 32},
    "speech_to_text": {"num_conv_layers": 2},
    "swin": _SHIFTED,
    "swinv2": _SHIFTED,
    "donut-swin": _SHIFTED,
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "moshi": {"codebook_size": 64},
    "perceiver": {"num_cross_attention_heads": 1},
    "qwen2_5_omni_vision_encoder": {"window_size": 32},
    "qwen2_5_vl_vision": {"window_size": 32},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "lsh_attn_chunk_length": 17,
        "local_attn_chunk_length": 17,
    },
    "textnet": {"stem_out_channels": 32},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xmod": {"default_language": "en_XX"},
}
# Where a configuration leaves out what its model needs.
MISSING = {"head_dim": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4}


def tiny_config(kind: type, **special: Any) -> Any:
    """A tiny configuration of the class `kind`; `special` are fields with values of their own."""
    return kind(**{**_fields(kind), **special})


def _fields(kind: Any) -> dict[str, Any]:
    full = kind()
    nested = {name: _fields(type(value)) for name, value in _nested(full)}
    local = {name: _tiny(name, value) for name, value in _defaults(kind, full)}
    equal = (
        {"num_key_value_heads": 4}
        if "num_attention_heads" in local and _has_equal_heads(full)
        else {}
    )
    missing = {name: value for name, value in MISSING.items() if _get(full, name, 0) is None}
    layers = _types_of_layers(kind, full)
    off = {name: value for name, value in OFF.items() if hasattr(full, name)}
    rotary = _rotary(full)
    return {
        **local,
        **off,
        **equal,
        **missing,
        **layers,
        **nested,
        **rotary,
        **_tokens(kind),
        **SPECIAL.get(kind.model_type, {}),
    }


_THREE = r"qwen2_vl|qwen2_5_vl|glm4v|glm46v|glm_ocr|hunyuan_vl"


def _rotary(whole: Any) -> Mapping[str, Any]:
    """Rotary positions of three kinds share the pairs of a head."""
    inputs = _get(whole, "rope_parameters")
    if not isinstance(inputs, dict) or not (
        "mrope_section" in inputs or re.search(_THREE, whole.model_type)
    ):
        return {}
    pairs = int(8 * inputs.get("partial_rotary_factor", 1)) // 2
    return {
        "rope_parameters": {
            **inputs,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
        }
    }


def _has_equal_heads(whole: Any) -> bool:
    """Returns True if keys have as many heads as queries; some attentions have to."""
    heads = _get(whole, "num_attention_heads")
    return heads is not None and heads == _get(whole, "num_key_value_heads")


def _get(config: Any, name: str, default: Any = None) -> Any:
    """A field that may be missing, or differ between layers."""
    try:
        return getattr(config, name, default)
    except RuntimeError:
        return default


def _nested(config: Any) -> Iterator[tuple[str, Any]]:
    from transformers import PreTrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield name, value


def _defaults(kind: type, whole: Any) -> Iterator[tuple[str, Any]]:
    """The fields that the class itself gives a value; what it computes from others is left
    to it."""
    for field in dataclasses.fields(kind):
        if field.init and _is_size(field.default):
            yield field.name, field.default
        elif (
            field.init
            and _is_size(getattr(whole, field.name, None))
            and field.default_factory is not _MISSING
        ):
            yield field.name, getattr(whole, field.name)


_MISSING = dataclasses.MISSING


def _is_size(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_size, value))
    return isinstance(value, int) and not isinstance(value, bool)


def _tiny(name: str, value: Any) -> Any:
    if name in ("num_heads", "num_attention_heads") and isinstance(value, list | tuple):
        return type(value)(2 ** min(stage + 1, 4) for stage in range(len(value)))
    if isinstance(value, list | tuple):
        return type(value)(_tiny(name, item) for item in value)
    cap = next((cap for pattern, cap in CAPS if re.fullmatch(pattern, name)), float("inf"))
    return min(value, cap) if value > 0 else value


OFF = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
}


def _types_of_layers(kind: type, whole: Any) -> Mapping[str, Any]:
    """Lists with an entry per layer, with each entry that occurs; and so many layers."""
    names = {field.name for field in dataclasses.fields(kind)}
    lists = {
        name: list(dict.fromkeys(getattr(whole, name, None) or ()))
        for name in COMBINED
        if name in names
    }
    count = max([2, *map(len, lists.values())])
    created = {name: (result * count)[:count] for name, result in lists.items() if result}
    return {
        **created,
        **{
            name: count
            for name in ("num_hidden_layers", "n_layer", "num_layers")
            if created and name in names
        },
    }


def _tokens(kind: type) -> dict[str, int]:
    """Different small numbers for the tokens that mean something; the same in nested
    configurations."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    named = [name for name in defaults if re.fullmatch(r".*(token_id|token_index)", name)]
    requested = [
        name
        for name in named
        if name in ("pad_token_id", "image_token_index") or _is_number(defaults[name])
    ]
    return {
        name: _BEGIN.get(name, 3 + sum(name.encode()) % (FIRST_TOKEN - 3)) for name in requested
    }


def _is_number(value: Any) -> bool:
    return value is not None and value is not _MISSING
