"""How to say a name of the diffusers library in our words, where no layout lists it.

A rule is (pattern of an underscored name, our words); the rules of a family are applied in order.
Words may end in a mark of the part of our weight that is meant: `@0`, `@1`, `@2` the first, second
and third stretch of as many rows as the change has, `@-1`, `@-2` the last and last but one, `@swap`
all rows with their halves exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

Rules = tuple[tuple[str, str], ...]

IN_OUT = (("1", "in"), ("2", "out"))


def _packed(theirs: Iterable[str], ours: str, parts: Iterable[str]) -> Rules:
    """Layers that we keep one below the other in one weight."""
    return tuple((name, f"{ours}@{part}") for name, part in zip(theirs, parts))


WAN: Rules = (
    (r"_attn1_", "_self_attn_"),
    (r"_attn2_", "_cross_attn_"),
    (r"_attn_to_([qkv])$", r"_attn_\1"),
    (r"_attn_to_out_0$", "_attn_o"),
    (r"_attn_add_([kv])_proj$", r"_attn_\1_img"),
    (r"_attn_norm_added_k$", "_attn_norm_k_img"),
    (r"_ffn_net_0_proj$", "_ffn_0"),
    (r"_ffn_net_2$", "_ffn_2"),
    (r"^(blocks_\d+)_norm2$", r"\1_norm3"),
    (r"^condition_embedder_(text|time)_embedder_linear_1$", r"\1_embedding_0"),
    (r"^condition_embedder_(text|time)_embedder_linear_2$", r"\1_embedding_2"),
    (r"^condition_embedder_time_proj$", "time_projection_1"),
    (r"^condition_embedder_image_embedder_ff_net_0_proj$", "img_emb_proj_1"),
    (r"^condition_embedder_image_embedder_ff_net_2$", "img_emb_proj_3"),
    (r"^proj_out$", "head_head"),
    (r"^(face_adapter)_(\d+)_to_q$", r"\1_fuser_blocks_\2_linear1_q"),
    (r"^(face_adapter)_(\d+)_to_k$", r"\1_fuser_blocks_\2_linear1_kv@0"),
    (r"^(face_adapter)_(\d+)_to_v$", r"\1_fuser_blocks_\2_linear1_kv@-1"),
    (r"^(face_adapter)_(\d+)_to_out$", r"\1_fuser_blocks_\2_linear2"),
)

FLUX: Rules = (
    (r"^(?:transformer|sformer)_blocks_", "double_blocks_"),
    (r"^single_transformer_blocks_", "single_blocks_"),
    *_packed(
        [rf"^(single_blocks_\d+)_attn_to_{n}$" for n in "qkv"], r"\1_linear1", ("0", "1", "2")
    ),
    (r"^(single_blocks_\d+)_proj_mlp$", r"\1_linear1@-1"),
    (r"^(single_blocks_\d+)_attn_to_qkv_mlp_proj$", r"\1_linear1"),
    (r"^(single_blocks_\d+)_(?:proj_out|attn_to_out)$", r"\1_linear2"),
    (r"^(single_blocks_\d+)_norm_linear$", r"\1_modulation_lin"),
    *_packed([rf"_attn_to_{n}$" for n in "qkv"], "_img_attn_qkv", ("0", "-2", "-1")),
    *_packed([rf"_attn_add_{n}_proj$" for n in "qkv"], "_txt_attn_qkv", ("0", "-2", "-1")),
    (r"_attn_to_qkv$", "_img_attn_qkv"),
    (r"_attn_to_added_qkv$", "_txt_attn_qkv"),
    (r"_attn_to_out_0$", "_img_attn_proj"),
    (r"_attn_to_add_out$", "_txt_attn_proj"),
    (r"_norm1_linear$", "_img_mod_lin"),
    (r"_norm1_context_linear$", "_txt_mod_lin"),
    (r"_ff_(?:net_0_proj|linear_in)$", "_img_mlp_0"),
    (r"_ff_(?:net_2|linear_out)$", "_img_mlp_2"),
    (r"_ff_context_(?:net_0_proj|linear_in)$", "_txt_mlp_0"),
    (r"_ff_context_(?:net_2|linear_out)$", "_txt_mlp_2"),
    (r"^(distilled_guidance_layer_layers_\d+)_linear_1$", r"\1_in_layer"),
    (r"^(distilled_guidance_layer_layers_\d+)_linear_2$", r"\1_out_layer"),
    (r"^((?:double|single)_stream_modulation(?:_img|_txt)?)_linear$", r"\1_lin"),
    (r"^x_embedder", "img_in"),
    (r"^context_embedder$", "txt_in"),
    *((rf"^time_(?:text|guidance)_embed_timestep_embedder_linear_{n}$", f"time_in_{w}_layer")
      for n, w in IN_OUT),
    *((rf"^time_(?:text|guidance)_embed_guidance_embedder_linear_{n}$", f"guidance_in_{w}_layer")
      for n, w in IN_OUT),
    *((rf"^time_text_embed_text_embedder_linear_{n}$", f"vector_in_{w}_layer") for n, w in IN_OUT),
    (r"^norm_out_linear$", "final_layer_adaLN_modulation_1@swap"),
    (r"^proj_out$", "final_layer_linear"),
)  # fmt: skip

REFINED_TEXT: Rules = (  # the part of HunyuanVideo that reads the text; the rest is as in FLUX
    (r"^(time_in|guidance_in|txt_in_t_embedder)_mlp_0$", r"\1_in_layer"),  # its authors' names
    (r"^(time_in|guidance_in|txt_in_t_embedder)_mlp_2$", r"\1_out_layer"),
    *((rf"^txt_in_c_embedder_linear_{n}$", f"txt_in_c_embedder_{w}_layer") for n, w in IN_OUT),
    (r"^context_embedder_proj_in$", "txt_in_input_embedder"),
    *((rf"^context_embedder_time_text_embed_timestep_embedder_linear_{n}$",
       f"txt_in_t_embedder_{w}_layer") for n, w in IN_OUT),
    *((rf"^context_embedder_time_text_embed_text_embedder_linear_{n}$",
       f"txt_in_c_embedder_{w}_layer") for n, w in IN_OUT),
    (r"^context_embedder_token_refiner_refiner_blocks_", "txt_in_individual_token_refiner_blocks_"),
    *_packed(
        [rf"^(txt_in_\w+_blocks_\d+)_attn_to_{n}$" for n in "qkv"], r"\1_self_attn_qkv",
        ("0", "-2", "-1"),
    ),
    (r"^(txt_in_\w+_blocks_\d+)_attn_to_out_0$", r"\1_self_attn_proj"),
    (r"^(txt_in_\w+_blocks_\d+)_norm_out_linear$", r"\1_adaLN_modulation_1"),
    (r"^(txt_in_\w+_blocks_\d+)_ff_net_0_proj$", r"\1_mlp_0"),
    (r"^(txt_in_\w+_blocks_\d+)_ff_net_2$", r"\1_mlp_2"),
    *FLUX,
)  # fmt: skip

LTX: Rules = (
    (r"^(audio_)?proj_in$", r"\1patchify_proj"),
    (r"^(audio_)?time_embed_", r"\1adaln_single_"),
    (r"^(audio_)?prompt_adaln_", r"\1prompt_adaln_single_"),
    (r"^av_cross_attn_(video|audio)_scale_shift_", r"av_ca_\1_scale_shift_adaln_single_"),
    (r"^av_cross_attn_(video|audio)_(a2v|v2a)_gate_", r"av_ca_\2_gate_adaln_single_"),
)

LUMINA: Rules = (
    *_packed([rf"_attn_to_{n}$" for n in "qkv"], "_attention_qkv", ("0", "-2", "-1")),
    (r"_attn_to_out_0$", "_attention_out"),
    (r"_feed_forward_linear_([123])$", r"_feed_forward_w\1"),
    (r"_norm1_linear$", "_adaLN_modulation_1"),
    (r"^time_caption_embed_timestep_embedder_linear_1$", "t_embedder_mlp_0"),
    (r"^time_caption_embed_timestep_embedder_linear_2$", "t_embedder_mlp_2"),
    (r"^time_caption_embed_caption_embedder_", "cap_embedder_"),
    (r"^norm_out_linear_1$", "final_layer_adaLN_modulation_1"),
    (r"^norm_out_linear_2$", "final_layer_linear"),
)

COSMOS: Rules = (
    *((rf"_norm{n}_linear_([12])$", rf"_adaln_modulation_{part}_\1")
      for n, part in (("1", "self_attn"), ("2", "cross_attn"), ("3", "mlp"))),
    (r"^transformer_blocks_", "blocks_"),
    (r"_attn1_", "_self_attn_"),
    (r"_attn2_", "_cross_attn_"),
    (r"_attn_to_([qkv])$", r"_attn_\1_proj"),
    (r"_attn_to_out_0$", "_attn_output_proj"),
    (r"_attn_norm_([qk])$", r"_attn_\1_norm"),
    (r"_ff_net_0_proj$", "_mlp_layer1"),
    (r"_ff_net_2$", "_mlp_layer2"),
    (r"^time_embed_t_embedder_", "t_embedder_1_"),
    (r"^time_embed_norm$", "t_embedding_norm"),
    (r"^patch_embed_proj$", "x_embedder_proj_1"),
    (r"^norm_out_linear_([12])$", r"final_layer_adaln_modulation_\1"),
    (r"^proj_out$", "final_layer_linear"),
)  # fmt: skip

WORDS: tuple[tuple[str, Rules], ...] = (
    ("blocks_0_self_attn_q", WAN),
    ("txt_in_individual_token_refiner_blocks_0_self_attn_qkv", REFINED_TEXT),
    ("double_blocks_0_img_attn_qkv", FLUX),
    ("patchify_proj", LTX),
    ("blocks_0_self_attn_q_proj", COSMOS),
    ("cap_embedder_1", LUMINA),
)
"""(underscored name of ours that tells the family, its rules)."""
