"""Small models of ``transformers``, one per architecture, made from configurations alone.

Widths and depths are small; the structure is the original's: grouped queries, windows, experts, states.
Weights are random. Dropout is zero, so that results can be compared with the module itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mixmesh.errors import InputError

from . import inputs
from .inputs import FRAMES, IMAGE, LENGTH, MEL_BINS, VOCABULARY, Batch

FAMILIES = (
    "decoder", "encoder", "encoder-decoder", "mixture of experts", "state space", "vision",
    "convolutional", "audio", "several kinds of input",
)  # fmt: skip
SEED = 0
CHANCE = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")


@dataclass(frozen=True)
class Architecture:
    """``model`` is a class of transformers, ``settings`` are keywords of its configuration (a mapping holds
    those of a part)."""

    name: str
    family: str
    model: str
    settings: Mapping[str, Any]
    batch: Callable[[], Batch] = field(repr=False)


def build(architecture: Architecture) -> tuple[nn.Module, Batch]:
    """The model, in training mode, and one global batch for it. Raises ImportError if ``transformers`` is not
    installed, InputError if it does not know the architecture."""
    import transformers

    transformers.logging.set_verbosity_error()  # remarks on sizes and token numbers that are small on purpose
    model = getattr(transformers, architecture.model, None)
    if model is None:
        raise InputError(
            f"transformers has no {architecture.model}",
            got=f"transformers {transformers.__version__}",
            hint="pip install --upgrade 'transformers>=5,<6'",
        )
    config = model.config_class(**architecture.settings)
    _without_chance(config, transformers.PreTrainedConfig)
    torch.manual_seed(SEED)
    return model(config).train(), architecture.batch()


def _without_chance(config: Any, kind: type) -> None:
    """No dropout, dropped layers or masked spans: in a configuration and in its parts."""
    for key, value in list(vars(config).items()):
        if isinstance(value, kind):
            _without_chance(value, kind)
        elif isinstance(value, float) and any(word in key for word in CHANCE):
            setattr(config, key, 0.0)


# --- settings that many have in common -----------------------------------------------------------------

TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = dict(
    **TOKENS, hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40,
    max_position_embeddings=64,
)  # fmt: skip
GROUPED = dict(**TEXT, num_key_value_heads=2)
EXPERTS = dict(**GROUPED, num_experts_per_tok=2, output_router_logits=True)
GPT = {k: v for k, v in TEXT.items() if k != "intermediate_size"}
MLA = dict(  # multi-head latent attention
    q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6
)
SEQ2SEQ = dict(
    **TOKENS, d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, max_position_embeddings=64,
    decoder_start_token_id=1, forced_eos_token_id=None,
)  # fmt: skip
T5 = dict(
    **TOKENS, d_model=24, d_kv=6, d_ff=40, num_layers=1, num_heads=4, num_decoder_layers=1,
    decoder_start_token_id=0,
)  # fmt: skip
PATCHES = dict(image_size=IMAGE, patch_size=8)
VIT = dict(**PATCHES, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
SWIN = dict(image_size=IMAGE, patch_size=4, embed_dim=12, depths=(2, 1), num_heads=(2, 4), window_size=4)
STAGES = dict(hidden_sizes=(8, 12, 16, 24), depths=(1, 1, 1, 1))
RESIDUAL = dict(embedding_size=8, **STAGES)
SPEECH = dict(
    hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, vocab_size=32,
    conv_dim=(8, 8, 8), conv_stride=(5, 4, 2), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2, classifier_proj_size=16,
)  # fmt: skip


def _group(family: str, rows: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]]):
    return tuple(Architecture(name, family, *row) for name, row in rows.items())


ARCHITECTURES: tuple[Architecture, ...] = (
    *_group("decoder", {
        "GPT-2": ("GPT2LMHeadModel", GPT, inputs.text),
        "GPT-Neo": ("GPTNeoForCausalLM", {
            **GPT, "num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]],
            "window_size": 4}, inputs.text),
        "GPT-J": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, inputs.text),
        "GPT-NeoX": ("GPTNeoXForCausalLM", TEXT, inputs.text),
        "GPT-BigCode": ("GPTBigCodeForCausalLM", GPT, inputs.text),
        "CodeGen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}, inputs.text),
        "OPT": ("OPTForCausalLM", {
            **GPT, "ffn_dim": 40, "word_embed_proj_dim": 24}, inputs.text),
        "BLOOM": ("BloomForCausalLM", {**TOKENS, "hidden_size": 24, "n_layer": 2, "n_head": 4}, inputs.text),
        "Falcon": ("FalconForCausalLM", {
            **GPT, "ffn_hidden_size": 40, "new_decoder_architecture": True, "num_kv_heads": 2}, inputs.text),
        "MPT": ("MptForCausalLM", {
            **TOKENS, "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, inputs.text),
        "Llama": ("LlamaForCausalLM", GROUPED, inputs.padded_text),
        "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, inputs.text),
        "Qwen2": ("Qwen2ForCausalLM", GROUPED, inputs.text),
        "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, inputs.text),
        "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, inputs.text),
        "Gemma 2": ("Gemma2ForCausalLM", {
            **GROUPED, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4}, inputs.text),
        "Gemma 3": ("Gemma3ForCausalLM", {
            **GROUPED, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"]}, inputs.text),
        "Phi": ("PhiForCausalLM", {**GROUPED, "hidden_size": 32}, inputs.text),
        "Phi-3": ("Phi3ForCausalLM", GROUPED, inputs.text),
        "StableLM": ("StableLmForCausalLM", GROUPED, inputs.text),
        "StarCoder2": ("Starcoder2ForCausalLM", GROUPED, inputs.text),
        "OLMo": ("OlmoForCausalLM", GROUPED, inputs.text),
        "OLMo 2": ("Olmo2ForCausalLM", GROUPED, inputs.text),
        "Granite": ("GraniteForCausalLM", GROUPED, inputs.text),
        "Cohere": ("CohereForCausalLM", {**GROUPED, "use_qk_norm": True}, inputs.text),
        "GLM": ("GlmForCausalLM", {**GROUPED, "head_dim": 8}, inputs.text),
        "SmolLM3": ("SmolLM3ForCausalLM", {
            **GROUPED, "num_hidden_layers": 2, "no_rope_layers": [1, 0]}, inputs.text),
        "Nemotron": ("NemotronForCausalLM", {**GROUPED, "head_dim": 6}, inputs.text),
        "Persimmon": ("PersimmonForCausalLM", {**TEXT, "hidden_size": 32}, inputs.text),
        "XGLM": ("XGLMForCausalLM", {**GPT, "ffn_dim": 40}, inputs.text),
        "BioGPT": ("BioGptForCausalLM", TEXT, inputs.text),
        "DiffLlama": ("DiffLlamaForCausalLM", GROUPED, inputs.text),
        "BitNet": ("BitNetForCausalLM", GROUPED, inputs.text),
    }),
    *_group("encoder", {
        "BERT": ("BertForMaskedLM", TEXT, inputs.padded_text),
        "RoBERTa": ("RobertaForMaskedLM", TEXT, inputs.padded_text),
        "DistilBERT": ("DistilBertForMaskedLM", {**GPT, "hidden_dim": 40}, inputs.padded_text),
        "ALBERT": ("AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, inputs.padded_text),
        "ELECTRA": ("ElectraForMaskedLM", {**TEXT, "embedding_size": 16}, inputs.padded_text),
        "DeBERTa v2": ("DebertaV2ForMaskedLM", {
            **TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
            inputs.padded_text),
        "MPNet": ("MPNetForMaskedLM", TEXT, inputs.padded_text),
        "XLNet": ("XLNetForSequenceClassification", {
            **TOKENS, "d_model": 24, "n_layer": 2, "n_head": 4, "d_inner": 40}, inputs.classified_text),
        "Funnel": ("FunnelForMaskedLM", {
            **TOKENS, "d_model": 24, "n_head": 4, "d_head": 6, "d_inner": 40, "block_sizes": (1, 1),
            "num_decoder_layers": 1}, inputs.text),
        "FNet": ("FNetForMaskedLM", {k: v for k, v in TEXT.items() if "heads" not in k}, inputs.text),
        "ModernBERT": ("ModernBertForMaskedLM", {
            **TEXT, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
            "local_attention": 4},
            inputs.padded_text),
        "Data2Vec (text)": ("Data2VecTextForMaskedLM", TEXT, inputs.padded_text),
        "ConvBERT": ("ConvBertForMaskedLM", {**TEXT, "embedding_size": 24}, inputs.text),
        "SqueezeBERT": ("SqueezeBertForMaskedLM", {**TEXT, "embedding_size": 24}, inputs.text),
        "MobileBERT": ("MobileBertForMaskedLM", {
            **TEXT, "embedding_size": 16, "intra_bottleneck_size": 24}, inputs.text),
        "RoFormer": ("RoFormerForMaskedLM", {**TEXT, "embedding_size": 24}, inputs.text),
        "Nystromformer": ("NystromformerForMaskedLM", {
            **TEXT, "num_landmarks": LENGTH, "segment_means_seq_len": LENGTH, "conv_kernel_size": 3},
            inputs.text),
        "CANINE": ("CanineForSequenceClassification", {
            **TEXT, "downsampling_rate": 4, "local_transformer_stride": 4, "num_hash_buckets": 40},
            inputs.classified_text),
        "Longformer": ("LongformerForMaskedLM", {**TEXT, "attention_window": 4}, inputs.text),
        "BigBird": ("BigBirdForMaskedLM", {
            **TEXT, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
            inputs.long_text),
        "Perceiver": ("PerceiverForSequenceClassification", {
            **TOKENS, "num_latents": 6, "d_latents": 16, "d_model": 24, "num_self_attends_per_block": 1,
            "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 64},
            lambda: {"inputs": inputs.ids(), "labels": inputs.classes()}),
    }),
    *_group("encoder-decoder", {
        "T5": ("T5ForConditionalGeneration", T5, inputs.translation),
        "mT5": ("MT5ForConditionalGeneration", T5, inputs.translation),
        "LongT5": ("LongT5ForConditionalGeneration", {
            **T5, "local_radius": 3, "encoder_attention_type": "local"}, inputs.masked_translation),
        "BART": ("BartForConditionalGeneration", SEQ2SEQ, inputs.translation),
        "mBART": ("MBartForConditionalGeneration", SEQ2SEQ, inputs.translation),
        "Pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ, inputs.translation),
        "Marian": ("MarianMTModel", SEQ2SEQ, inputs.translation),
        "Blenderbot": ("BlenderbotForConditionalGeneration", SEQ2SEQ, inputs.translation),
        "M2M-100": ("M2M100ForConditionalGeneration", SEQ2SEQ, inputs.translation),
        "ProphetNet": ("ProphetNetForConditionalGeneration", {
            **TOKENS, "hidden_size": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
            "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4, "max_position_embeddings": 64}, inputs.translation),
        "LED": ("LEDForConditionalGeneration", {
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
            "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
            "attention_window": 4}, inputs.translation),
    }),
    *_group("mixture of experts", {
        "Mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, inputs.text),
        "Qwen3-MoE": ("Qwen3MoeForCausalLM", {
            **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 6}, inputs.text),
        "OLMoE": ("OlmoeForCausalLM", {**EXPERTS, "num_experts": 4}, inputs.text),
        "Granite-MoE": ("GraniteMoeForCausalLM", {**EXPERTS, "num_local_experts": 4}, inputs.text),
        "GPT-OSS": ("GptOssForCausalLM", {
            **EXPERTS, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 6, "sliding_window": 4},
            inputs.text),
        "DeepSeek v3": ("DeepseekV3ForCausalLM", {
            **TEXT, **MLA, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1}, inputs.text),
        "Llama 4 (text)": ("Llama4ForCausalLM", {
            **GROUPED, "num_hidden_layers": 2, "num_local_experts": 4, "head_dim": 6,
            "intermediate_size_mlp": 40,
            "attention_chunk_size": 4}, inputs.text),
        "Switch Transformers": ("SwitchTransformersForConditionalGeneration", {
            **T5, "num_experts": 4, "expert_capacity": 16, "encoder_sparse_step": 1,
            "decoder_sparse_step": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
            inputs.masked_translation),
    }),
    *_group("state space", {
        "Mamba": ("MambaForCausalLM", {
            **TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4},
            inputs.text),
        "Mamba 2": ("Mamba2ForCausalLM", {
            **TOKENS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "num_heads": 4,
            "head_dim": 8, "n_groups": 1, "chunk_size": 4}, inputs.text),
        "Jamba": ("JambaForCausalLM", {
            **EXPERTS, "num_hidden_layers": 2, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1, "use_mamba_kernels": False}, inputs.text),
        "RWKV": ("RwkvForCausalLM", {
            **TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16,
            "intermediate_size": 32, "context_length": 64}, inputs.text),
        "RecurrentGemma": ("RecurrentGemmaForCausalLM", {
            **GROUPED, "num_hidden_layers": 2, "lru_width": 24, "head_dim": 6, "attention_window_size": 4,
            "block_types": ["recurrent", "attention"]}, inputs.text),
    }),
    *_group("vision", {
        "ViT": ("ViTForImageClassification", VIT, inputs.image),
        "DeiT": ("DeiTForImageClassification", VIT, inputs.image),
        "BEiT": ("BeitForImageClassification", {**VIT, "use_relative_position_bias": True}, inputs.image),
        "DINOv2": ("Dinov2ForImageClassification", {
            **{k: v for k, v in VIT.items() if k != "intermediate_size"}, "mlp_ratio": 2}, inputs.image),
        "ViT-MAE": ("ViTMAEForPreTraining", {
            **VIT, "decoder_num_attention_heads": 4, "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32}, inputs.masked_image),
        "Data2Vec (vision)": ("Data2VecVisionForImageClassification", VIT, inputs.image),
        "Swin": ("SwinForImageClassification", SWIN, inputs.image),
        "Swin v2": ("Swinv2ForImageClassification", SWIN, inputs.image),
        "SegFormer": ("SegformerForImageClassification", {
            "hidden_sizes": (8, 12, 16, 24), "depths": (1, 1, 1, 1), "num_attention_heads": (1, 2, 2, 4)},
            inputs.image),
        "PVT v2": ("PvtV2ForImageClassification", {
            **STAGES, "image_size": IMAGE, "num_attention_heads": (1, 2, 2, 4)}, inputs.image),
        "CvT": ("CvtForImageClassification", {
            "embed_dim": (8, 16, 24), "num_heads": (1, 2, 4), "depth": (1, 2, 3)}, inputs.large_image),
        "Hiera": ("HieraForImageClassification", {
            "image_size": (2 * IMAGE, 2 * IMAGE), "embed_dim": 8, "depths": (1, 1, 1),
            "num_heads": (1, 2, 4), "num_query_pool": 2, "masked_unit_size": (4, 4),
            "masked_unit_attention": (True, True, False)}, inputs.large_image),
    }),
    *_group("convolutional", {
        "ResNet": ("ResNetForImageClassification", RESIDUAL, inputs.large_image),
        "RegNet": ("RegNetForImageClassification", {**RESIDUAL, "groups_width": 4}, inputs.large_image),
        "BiT": ("BitForImageClassification", {**RESIDUAL, "num_groups": 4}, inputs.image),
        "ConvNeXt": ("ConvNextForImageClassification", STAGES, inputs.image),
        "ConvNeXt v2": ("ConvNextV2ForImageClassification", STAGES, inputs.image),
        # on images of 64 pixels both fail in float32; one device's own gradients differ as much from its
        # float64 ones (docs/reference/architectures.md), probably because of the kinks of ReLU6
        "MobileNet v1": ("MobileNetV1ForImageClassification", {
            "image_size": IMAGE, "depth_multiplier": 0.25}, inputs.image),
        "MobileNet v2": ("MobileNetV2ForImageClassification", {
            "image_size": IMAGE, "depth_multiplier": 0.25}, inputs.image),
        "EfficientNet": ("EfficientNetForImageClassification", {
            "image_size": 2 * IMAGE, "width_coefficient": 0.25, "depth_coefficient": 0.5,
            "hidden_dim": 320}, inputs.large_image),
        "PoolFormer": ("PoolFormerForImageClassification", STAGES, inputs.image),
        "FocalNet": ("FocalNetForImageClassification", {
            "image_size": IMAGE, "embed_dim": 8, "hidden_sizes": (8, 16), "depths": (1, 1),
            "focal_levels": (2, 2), "focal_windows": (3, 3)}, inputs.image),
        "LeViT": ("LevitForImageClassification", {
            "image_size": 2 * IMAGE, "hidden_sizes": (16, 24, 32), "num_attention_heads": (2, 3, 4),
            "depths": (1, 1, 1), "key_dim": (4, 4, 4)}, inputs.large_image),
        # with the default 0.02, for larger widths, it amplifies rounding to 1e-2: fails in float32
        "MobileViT": ("MobileViTForImageClassification", {
            "image_size": 2 * IMAGE, "hidden_sizes": (16, 24, 32), "neck_hidden_sizes": (
                8, 8, 12, 12, 16, 16, 32), "initializer_range": 0.2}, inputs.large_image),
    }),
    *_group("audio", {
        "Wav2Vec2": ("Wav2Vec2ForSequenceClassification", SPEECH, inputs.classified_sound),
        "Wav2Vec2, CTC": ("Wav2Vec2ForCTC", SPEECH, inputs.sound),
        "HuBERT": ("HubertForSequenceClassification", SPEECH, inputs.classified_sound),
        "WavLM": ("WavLMForSequenceClassification", SPEECH, inputs.classified_sound),
        "UniSpeech": ("UniSpeechForSequenceClassification", SPEECH, inputs.classified_sound),
        "Data2Vec (audio)": ("Data2VecAudioForSequenceClassification", {
            **SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3}, inputs.classified_sound),
        "SEW": ("SEWForSequenceClassification", SPEECH, inputs.classified_sound),
        "Whisper": ("WhisperForConditionalGeneration", {
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
            "num_mel_bins": MEL_BINS, "max_source_positions": FRAMES // 2, "max_target_positions": 64,
            "begin_suppress_tokens": None}, inputs.spectrogram),
        "Speech2Text": ("Speech2TextForConditionalGeneration", {
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
            "input_feat_per_channel": MEL_BINS, "conv_channels": 16, "max_source_positions": 64,
            "max_target_positions": 64}, inputs.frames_of_spectrogram),
        "Audio Spectrogram Transformer": ("ASTForAudioClassification", {
            "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
            "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": FRAMES,
            "num_mel_bins": MEL_BINS}, inputs.classified_spectrogram),
    }),
    *_group("several kinds of input", {
        "CLIP": ("CLIPModel", {
            "text_config": TEXT, "vision_config": VIT, "projection_dim": 16}, inputs.image_and_text),
        "SigLIP": ("SiglipModel", {"text_config": TEXT, "vision_config": VIT}, inputs.image_and_text),
        "LayoutLM": ("LayoutLMForMaskedLM", {**TEXT, "max_2d_position_embeddings": 64}, inputs.layout),
    }),
)  # fmt: skip
