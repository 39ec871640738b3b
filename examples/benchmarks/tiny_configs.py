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
VOCABULARY, FIRST_TOKEN, END, IMAGE = 96, 48, 2, 32

# The first expression that matches the whole name of a field gives its largest value.
CAPS = r"""
inf .*(token_id|token_index|_idx|_ids|_index|_indices|_indexes)
4 type_vocab_sizes?|n_langs
64 .*codebook_size
16 feature_projection_input_dim|context_size
96 .*vocab_size.*|num_embeddings|num_embeds|.*vocab|ngram_vocab_size_base
64 max_.*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length|model_max_length
8 .*sliding_window(_size)?|local_attention|attention_window(_size)?|attention_chunk_size|keep_window_size
2 .*(layer_pattern|window_pattern|every_n_layers|layer_period|layer_interval|sparse_step|layer_step)
1 (layer_group_size|layers_block_freq|attn_layer_offset|expert_layer_offset|cross_layer_interval)
1 num_hidden_groups|inner_group_num|num_res_blocks|num_conv_layers|num_adapter_layers
2 .*(num_|n_|encoder_|decoder_|hidden_)?layers(_per_stack)?|n_layer|depth|depths|.*num_hidden_layers
1 num_blocks|num_block_repeats|stage_num(b_of)?_?(blocks|layers)|block_sizes|resampler_depth|repeats
1 first_k_dense_replace|num_dense_layers|max_window_layers|num_kv_shared_layers
2 num_experts_per_tok(en)?|moe_top_?k|num_selected_experts|topk_group|moe_k
2 n_groups?|num_expert_group
1 (moe_)?num_shared_experts|n_shared_experts
4 .*experts|moe_num_experts|zero_expert_num|expert_capacity
2 .*(num_|n_)(key_value|kv|query)_?(heads|groups)|kv_n_heads
4 .*(heads|n_head|num_heads|heads_per_ngram|conv_pos_embedding_groups|head)
4 rotary_dim
16 qk_head_dim
8 .*(head_dim|d_kv|d_head|dim_head|head_size|headdim|kv_channels|key_dim)
8 .*(lora_rank|rank|d_rel|dt_rank|time_step_rank)
8 index_topk(_blocks)?
8 .*(state_size|d_state|num_mem_blocks)
8 .*(chunk_size|chunk_length|block_size|segment_means_seq_len|num_landmarks)
16 .*(num_buckets|rel_.*_bins|max_rel.*pos|max_distance|relative_positions?)
16 .*num_conv_pos_embeddings|.*pos_emb_(height|width)|num_position_embeddings
16 embed_dim
32 .*image_size|crop_size|resolution|img_size
8 patch_size
4 window_size
4 upsample_groups|groups_width
16 .*(num_mel_bins|mel_dim|feature_size|feat_per_channel|n_mel_bins|input_feat_size)
64 .*(intermediate|ffn|ff|feedforward|feed_forward|inner|mlp)(_hidden)?_?(dim|size|mlp|hidden_size)
64 d_ff|n_inner|dff|dim_ff|d_inner|mamba_d_ssm|lru_width|projector_hidden_size
32 .*(hidden_size|hidden_dim|embed_?dims?|emb_dim|embed_size|embedding_size|embedding_dim|proj_embed_dim)
32 (d_model|n_embd|dim|emb_dim|proj_size|d_latents|width|embedding_rank|hidden_size_.*|hidden_sizes)
32 .*(output_dim|out_dim|in_dim|input_dim|projection_dim|projection_size|classifier_proj_size|codevector_dim)
32 conv_dim|tdnn_dim|.*conv_channels|attention_hidden_size|base_channels|latent_channels|neck_hidden_sizes
4 .*(query_tokens|num_latents|image_tokens|tokens_per_image|query_num|num_queries|num_negatives)
"""
LISTS = (  # with an entry per layer
    *("layer_types", "mlp_layer_types", "indexer_types"),
    *("layers_block_type", "block_types", "attn_layers"),
)
ENDS = ("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "pad_token_id")
BEGIN = dict(zip(ENDS, (1, END, 2, 1, 0), strict=True))
DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment")
# Where a configuration leaves out what its model needs.
MISSING = {"head_dim": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4}
# What a class without these values cannot do; no rule by name would say it.
WORDS, WIDTHS = {"vocab_size": VOCABULARY}, {"hidden_sizes": [32] * 4}
PINPOINTS, WINDOW = {"image_grid_pinpoints": [[IMAGE, IMAGE]]}, {"window_size": 32}
NARROW = {"depth_multiplier": 0.25}
SHIFTED = {"depths": (2, 1), "num_heads": (2, 4)}  # with and without windows to shift
IN_TURN = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CHANNELS = {"stage_in_channels": [48, 32, 32, 32], "stage_out_channels": [32] * 4}
CHUNKS = {"lsh_attn_chunk_length": 17, "local_attn_chunk_length": 17}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("esm", "esmc", "wav2vec2-bert", "wav2vec2-conformer"), WORDS),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), PINPOINTS),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), IN_TURN),
    **dict.fromkeys(("mobilenet_v1", "mobilenet_v2"), NARROW),
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), SHIFTED),
    **dict.fromkeys(("qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision"), WINDOW),
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4, "embedding_size": 8},
    "cvt": {"depth": [1, 1, 1], "num_heads": [1, 2, 4], "embed_dim": [8, 16, 32]},
    "dots1": {"n_shared_experts": 1},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hgnet_v2": {**WIDTHS, **CHANNELS},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {"patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64},
    "moshi": {"codebook_size": 64},
    "mpnet": {"relative_attention_num_buckets": 32},
    "perceiver": {"num_cross_attention_heads": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, **CHUNKS},
    "speech_to_text": {"num_conv_layers": 2},
    "textnet": {"stem_out_channels": 32},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(kind: type, **special: Any) -> Any:
    """A tiny configuration of the class `kind`; `special` are fields with values of their own."""
    return kind(**{**_fields(kind), **special})


def _fields(kind: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    full, fields = kind(), {field.name: field for field in dataclasses.fields(kind)}
    result = {name: _tiny(name, value) for name, value in _sizes(fields, full)}
    result |= {name: type(_get(full, name))() for name in DROPS if hasattr(full, name)}
    heads = _get(full, "num_attention_heads")
    if "num_attention_heads" in result and heads is not None:
        # some attentions need as many heads of keys as of queries
        result |= {"num_key_value_heads": 4} if heads == _get(full, "num_key_value_heads") else {}
    result |= {name: value for name, value in MISSING.items() if _get(full, name, 0) is None}
    result |= _types_of_layers(fields, full)
    nested = {n: v for n, v in vars(full).items() if isinstance(v, PreTrainedConfig)}
    result |= {name: _fields(type(value)) for name, value in nested.items()}
    return {**result, **_rotary(full), **_tokens(fields), **SPECIAL.get(kind.model_type, {})}


def _get(config: Any, name: str, default: Any = None) -> Any:
    """A field that may be missing, or differ between layers."""
    try:
        return getattr(config, name, default)
    except RuntimeError:
        return default


def _sizes(fields: Mapping[str, Any], whole: Any) -> Iterator[tuple[str, Any]]:
    """The fields that the class itself gives a value; what it computes from others is left
    to it."""
    for name, field in fields.items():
        if field.init and _is_size(field.default):
            yield name, field.default
        elif field.init and field.default_factory is not dataclasses.MISSING:
            value = getattr(whole, name, None)
            yield from [(name, value)] if _is_size(value) else []


def _is_size(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_size, value))
    return isinstance(value, int) and not isinstance(value, bool)


def _tiny(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        if name in ("num_heads", "num_attention_heads"):
            return type(value)(2 ** min(stage + 1, 4) for stage in range(len(value)))
        return type(value)(_tiny(name, item) for item in value)
    rules = (rule.split(" ") for rule in CAPS.strip().splitlines())
    cap = next((cap for cap, pattern in rules if re.fullmatch(pattern, name)), "inf")
    return value if value <= 0 or cap == "inf" else min(value, int(cap))


def _rotary(whole: Any) -> Mapping[str, Any]:
    """Rotary positions of three kinds share the pairs of a head."""
    inputs = _get(whole, "rope_parameters")
    three = re.search(r"qwen2_vl|qwen2_5_vl|glm4v|glm46v|glm_ocr|hunyuan_vl", whole.model_type)
    if not isinstance(inputs, dict) or not ("mrope_section" in inputs or three):
        return {}
    pairs = int(8 * inputs.get("partial_rotary_factor", 1)) // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return {"rope_parameters": {**inputs, "mrope_section": sections}}


def _types_of_layers(names: Mapping[str, Any], whole: Any) -> Mapping[str, Any]:
    """Lists with an entry per layer, with each entry that occurs; and so many layers."""
    lists = {n: list(dict.fromkeys(getattr(whole, n, None) or ())) for n in LISTS if n in names}
    count = max([2, *map(len, lists.values())])
    created = {name: (result * count)[:count] for name, result in lists.items() if result}
    counts = {"num_hidden_layers", "n_layer", "num_layers"}.intersection(names if created else ())
    return {**created, **dict.fromkeys(counts, count)}


def _tokens(fields: Mapping[str, Any]) -> dict[str, int]:
    """Different small numbers for the tokens that mean something; the same in nested
    configurations."""
    named = [name for name in fields if re.fullmatch(r".*(token_id|token_index)", name)]
    always, none = ("pad_token_id", "image_token_index"), (None, dataclasses.MISSING)
    asked = [name for name in named if name in always or fields[name].default not in none]
    return {name: BEGIN.get(name, 3 + sum(name.encode()) % (FIRST_TOKEN - 3)) for name in asked}
