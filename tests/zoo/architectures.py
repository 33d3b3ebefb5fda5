"""Tiny models with random weights, one for each way in which language models differ."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCABULARY = 288
"""Rows of every embedding: the 256 bytes, special tokens, and some that no tokenizer has."""
POSITIONS = 256
"""Longest context."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
DROPOUTS = (
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_dropout",
    "attn_pdrop", "dropout", "emb_pdrop", "embd_pdrop", "embed_dropout", "embedding_dropout",
    "hidden_dropout", "hidden_dropout_prob", "resid_dropout", "resid_pdrop", "residual_dropout",
)  # fmt: skip
"""Names of the dropout that configurations have. The zoo sets each to a fifth."""


BOTH_WAYS = {"everywhere": "generation token by token and one forward pass differ"}
PADDING = {"everywhere": "padding on the left has an effect although it is masked"}
NO_CACHE = {"stacked": "which has no key-value cache"}


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo."""

    models: str
    """Models that users know it by."""
    config_class: str
    """Its configuration in transformers."""
    options: Mapping[str, Any]
    """What the configuration is made of."""
    features: tuple[str, ...]
    """What sets it apart."""
    text_config: str = ""
    """Configuration class of the text part, which `options` are for, where it is nested."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Options of a nested configuration beside its text part."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """What FIRM refuses, with the reason in its message: "everywhere" or "stacked"."""

    def config(self, special: Mapping[str, int | None]) -> PreTrainedConfig:
        """Returns the configuration for ids of special tokens, with dropout if it has any."""
        options = {**self.options, **special}
        if not self.text_config:
            return _with_dropout(getattr(transformers, self.config_class)(**options))
        text = _with_dropout(getattr(transformers, self.text_config)(**options))
        return getattr(transformers, self.config_class)(text_config=text.to_dict(), **self.outer)

    def model(self, special: Mapping[str, int | None], *, seed: int = 0) -> PreTrainedModel:
        """Returns the model in float32 and evaluation mode, with weights that matter.

        Initial weights of 0.02 would make all distributions flat, and biases and positions of zero
        would hide mistakes; so every parameter is moved by noise.
        """
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.config(special), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (0.25 if parameter.ndim > 1 else 0.1))
        return model.eval()


@torch.no_grad()
def swap_outputs_(model: Any, one: int, other: int) -> None:
    """Lets two tokens change places in what a model says."""
    head = model.get_output_embeddings()
    for values in (head.weight, getattr(head, "bias", None)):
        if values is not None:
            values[[one, other]] = values[[other, one]]


def _with_dropout(config: Any) -> Any:
    for name in DROPOUTS:
        if isinstance(getattr(config, name, None), float | int):
            setattr(config, name, 0.2)
    return config


HEADED = {**GROUPED, "head_dim": 8}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERT_SIZES = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
SOFT_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 3.0}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
STATE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8,
}  # fmt: skip
MAMBA = {
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
LATENT = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "Llama 2 and 3, TinyLlama, Yi",
        "LlamaConfig",
        GROUPED,
        ("rotary positions", "RMSNorm", "grouped queries"),
    ),
    "llama_tied": Architecture(
        "SmolLM2, Llama 3.2",
        "LlamaConfig",
        {**GROUPED, "tie_word_embeddings": True},
        ("tied head",),
    ),
    "mistral": Architecture(
        "Mistral 7B", "MistralConfig", {**HEADED, "sliding_window": 16}, ("sliding window",)
    ),
    "ministral": Architecture(
        "Ministral 8B", "MinistralConfig", {**HEADED, **SLIDING}, ("sliding window",)
    ),
    "mixtral": Architecture(
        "Mixtral", "MixtralConfig", {**GROUPED, **EXPERTS}, ("mixture of experts",)
    ),
    "qwen2": Architecture(
        "Qwen 2 and 2.5",
        "Qwen2Config",
        {**GROUPED, "tie_word_embeddings": True},
        ("biased projections", "tied head"),
    ),
    "qwen2_moe": Architecture(
        "Qwen1.5-MoE",
        "Qwen2MoeConfig",
        {**GROUPED, **EXPERTS, **EXPERT_SIZES},
        ("mixture of experts",),
    ),
    "qwen3": Architecture(
        "Qwen 3",
        "Qwen3Config",
        {**HEADED, "tie_word_embeddings": True},
        ("normalised queries", "tied head"),
    ),
    "qwen3_moe": Architecture(
        "Qwen 3 MoE",
        "Qwen3MoeConfig",
        {**HEADED, **EXPERTS, "moe_intermediate_size": 16},
        ("mixture of experts", "normalised queries"),
    ),
    "qwen3_next": Architecture(
        "Qwen3-Next",
        "Qwen3NextConfig",
        {**HEADED, **EXPERTS, **EXPERT_SIZES, **LINEAR},
        ("linear attention", "mixture of experts"),
    ),
    "qwen3_5": Architecture(
        "Qwen 3.5, its text part", "Qwen3_5TextConfig", {**HEADED, **LINEAR}, ("linear attention",)
    ),
    "gemma": Architecture(
        "Gemma", "GemmaConfig", {**HEADED}, ("scaled embeddings or logits", "tied head")
    ),
    "gemma2": Architecture(
        "Gemma 2",
        "Gemma2Config",
        {**HEADED, "sliding_window": 16, "query_pre_attn_scalar": 8, **SOFT_CAPS},
        ("soft-capped logits", "sliding window", "tied head"),
    ),
    "gemma3_text": Architecture(
        "Gemma 3 1B",
        "Gemma3TextConfig",
        {**HEADED, **SLIDING, "query_pre_attn_scalar": 8},
        ("sliding window", "normalised queries", "tied head"),
    ),
    "gemma3": Architecture(
        "Gemma 3 4B and larger",
        "Gemma3Config",
        {**HEADED, **SLIDING, "query_pre_attn_scalar": 8},
        ("nested", "sliding window", "tied head"),
        text_config="Gemma3TextConfig",
        outer={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "image_token_index": 280,
            "boi_token_index": 281,
            "eoi_token_index": 282,
        },
    ),
    "gemma3n_text": Architecture(
        "Gemma 3n, its text part",
        "Gemma3nTextConfig",
        {
            **HEADED,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            **SLIDING,
            "intermediate_size": [48, 48],
        },
        ("embeddings in each layer", "tied head"),
    ),
    "gemma4_text": Architecture(
        "Gemma 4, its text part",
        "Gemma4TextConfig",
        {
            **HEADED,
            "global_head_dim": 8,
            **SLIDING,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
        ("embeddings in each layer", "tied head"),
    ),
    "llama4_text": Architecture(
        "Llama 4, its text part",
        "Llama4TextConfig",
        {
            **HEADED,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 32,
            "num_experts_per_tok": 1,
        },
        ("chunked attention", "layers without positions", "mixture of experts"),
    ),
    "phi": Architecture(
        "Phi 1.5 and 2",
        "PhiConfig",
        {**SIZES, "partial_rotary_factor": 0.5},
        ("parallel attention", "partly rotary positions", "LayerNorm"),
    ),
    "phi3": Architecture(
        "Phi 3 and 4", "Phi3Config", {**GROUPED, "sliding_window": None}, ("fused projections",)
    ),
    "phimoe": Architecture(
        "Phi 3.5 MoE", "PhimoeConfig", {**GROUPED, **EXPERTS}, ("mixture of experts", "LayerNorm")
    ),
    "gpt2": Architecture(
        "GPT-2, DistilGPT-2",
        "GPT2Config",
        GPT2,
        ("learned positions", "fused projections", "LayerNorm", "tied head"),
    ),
    "gpt_bigcode": Architecture(
        "StarCoder, SantaCoder",
        "GPTBigCodeConfig",
        {**GPT2, "multi_query": True},
        ("learned positions", "one key head", "LayerNorm"),
    ),
    "openai-gpt": Architecture(
        "GPT",
        "OpenAIGPTConfig",
        GPT2,
        ("learned positions", "no cache", "LayerNorm"),
        refused=NO_CACHE,
    ),
    "gpt_neo": Architecture(
        "GPT-Neo",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 16,
            "max_position_embeddings": POSITIONS,
        },
        ("learned positions", "sliding window", "LayerNorm"),
    ),
    "gpt_neox": Architecture(
        "Pythia, GPT-NeoX",
        "GPTNeoXConfig",
        {**SIZES, "rotary_pct": 0.5},
        ("parallel attention", "fused projections", "partly rotary positions", "LayerNorm"),
    ),
    "gptj": Architecture(
        "GPT-J",
        "GPTJConfig",
        {**GPT2, "rotary_dim": 4},
        ("parallel attention", "partly rotary positions", "LayerNorm"),
    ),
    "codegen": Architecture(
        "CodeGen",
        "CodeGenConfig",
        {**GPT2, "rotary_dim": 4},
        ("parallel attention", "fused projections", "LayerNorm"),
    ),
    "opt": Architecture(
        "OPT",
        "OPTConfig",
        {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
        ("learned positions", "LayerNorm", "tied head"),
    ),
    "bloom": Architecture(
        "BLOOM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        ("ALiBi", "fused projections", "LayerNorm", "tied head"),
    ),
    "mpt": Architecture(
        "MPT",
        "MptConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": POSITIONS,
            "expansion_ratio": 2,
        },
        ("ALiBi", "fused projections", "LayerNorm", "tied head"),
    ),
    "falcon": Architecture(
        "Falcon 7B",
        "FalconConfig",
        {
            **SIZES,
            "ffn_hidden_size": 48,
            "multi_query": True,
            "new_decoder_architecture": False,
            "alibi": False,
        },
        ("one key head", "fused projections", "parallel attention", "LayerNorm"),
    ),
    "falcon_alibi": Architecture(
        "Falcon RW",
        "FalconConfig",
        {
            **SIZES,
            "ffn_hidden_size": 48,
            "alibi": True,
            "multi_query": False,
            "new_decoder_architecture": False,
            "bias": True,
            "parallel_attn": False,
        },
        ("ALiBi", "fused projections", "LayerNorm"),
    ),
    "granite": Architecture(
        "Granite 3",
        "GraniteConfig",
        {
            **GROUPED,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
        ("scaled embeddings or logits",),
    ),
    "granitemoe": Architecture(
        "Granite 3 MoE",
        "GraniteMoeConfig",
        {**GROUPED, **EXPERTS, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
        ("scaled embeddings or logits", "mixture of experts"),
    ),
    "cohere": Architecture(
        "Command R, Aya",
        "CohereConfig",
        {**GROUPED, "logit_scale": 0.5, "use_qk_norm": True},
        ("scaled embeddings or logits", "parallel attention", "LayerNorm", "tied head"),
    ),
    "cohere2": Architecture(
        "Command A, Command R7B",
        "Cohere2Config",
        {**GROUPED, "logit_scale": 0.5, **SLIDING},
        (
            "scaled embeddings or logits",
            "layers without positions",
            "sliding window",
            "LayerNorm",
            "tied head",
        ),
    ),
    "olmo": Architecture("OLMo", "OlmoConfig", {**GROUPED, "clip_qkv": 2.0}, ("LayerNorm",)),
    "olmo2": Architecture(
        "OLMo 2", "Olmo2Config", GROUPED, ("norms after layers", "normalised queries")
    ),
    "olmo3": Architecture(
        "OLMo 3", "Olmo3Config", {**GROUPED, **SLIDING}, ("norms after layers", "sliding window")
    ),
    "olmoe": Architecture(
        "OLMoE", "OlmoeConfig", {**GROUPED, **EXPERTS}, ("mixture of experts", "normalised queries")
    ),
    "stablelm": Architecture(
        "StableLM",
        "StableLmConfig",
        {**GROUPED, "use_parallel_residual": True},
        ("parallel attention", "partly rotary positions", "LayerNorm"),
    ),
    "starcoder2": Architecture(
        "StarCoder 2",
        "Starcoder2Config",
        {**GROUPED, "sliding_window": 16},
        ("sliding window", "biased projections", "LayerNorm", "tied head"),
    ),
    "smollm3": Architecture(
        "SmolLM3",
        "SmolLM3Config",
        {**GROUPED, "no_rope_layers": [1, 0]},
        ("layers without positions", "tied head"),
    ),
    "nemotron": Architecture(
        "Nemotron 4, Minitron", "NemotronConfig", GROUPED, ("partly rotary positions", "LayerNorm")
    ),
    "glm": Architecture("GLM-4 9B", "GlmConfig", {**HEADED}, ("partly rotary positions",)),
    "glm4": Architecture(
        "GLM-4 0414", "Glm4Config", {**HEADED}, ("norms after layers", "partly rotary positions")
    ),
    "helium": Architecture("Helium", "HeliumConfig", {**HEADED}, ("rotary positions",)),
    "exaone4": Architecture(
        "EXAONE 4",
        "Exaone4Config",
        {**GROUPED, **SLIDING},
        ("norms after layers", "sliding window", "normalised queries"),
    ),
    "deepseek_v2": Architecture(
        "DeepSeek V2", "DeepseekV2Config", LATENT, ("latent attention", "mixture of experts")
    ),
    "deepseek_v3": Architecture(
        "DeepSeek V3 and R1", "DeepseekV3Config", LATENT, ("latent attention", "mixture of experts")
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssConfig",
        {**HEADED, **EXPERTS, **SLIDING},
        ("attention sinks", "mixture of experts", "sliding window"),
    ),
    "ernie4_5": Architecture("ERNIE 4.5", "Ernie4_5Config", {**HEADED}, ("tied head",)),
    "persimmon": Architecture(
        "Persimmon",
        "PersimmonConfig",
        SIZES,
        ("fused projections", "partly rotary positions", "LayerNorm"),
    ),
    "biogpt": Architecture(
        "BioGPT", "BioGptConfig", SIZES, ("learned positions", "LayerNorm", "tied head")
    ),
    "xglm": Architecture(
        "XGLM",
        "XGLMConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": POSITIONS,
        },
        ("sinusoidal positions", "LayerNorm", "tied head"),
    ),
    "mamba": Architecture(
        "Mamba",
        "MambaConfig",
        {**STATE, "time_step_rank": 4},
        ("state space", "tied head"),
        refused=NO_CACHE,
    ),
    "mamba2": Architecture(
        "Mamba 2, Codestral Mamba",
        "Mamba2Config",
        {**STATE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
        ("state space",),
        refused=NO_CACHE,
    ),
    "falcon_mamba": Architecture(
        "Falcon Mamba",
        "FalconMambaConfig",
        {**STATE, "time_step_rank": 4},
        ("state space",),
        refused=NO_CACHE,
    ),
    "jamba": Architecture(
        "Jamba",
        "JambaConfig",
        {
            **GROUPED,
            **EXPERTS,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
        ("state space", "mixture of experts"),
    ),
    "bamba": Architecture(
        "Bamba", "BambaConfig", {**GROUPED, **MAMBA, "attn_layer_indices": [1]}, ("state space",)
    ),
    "granitemoehybrid": Architecture(
        "Granite 4",
        "GraniteMoeHybridConfig",
        {
            **GROUPED,
            **EXPERTS,
            "shared_intermediate_size": 16,
            **MAMBA,
            "layer_types": ["mamba", "attention"],
        },
        ("state space", "mixture of experts"),
    ),
    "falcon_h1": Architecture(
        "Falcon H1", "FalconH1Config", {**HEADED, **MAMBA, "mamba_d_ssm": 64}, ("state space",)
    ),
    "recurrent_gemma": Architecture(
        "RecurrentGemma",
        "RecurrentGemmaConfig",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "lru_width": 32,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
        },
        ("recurrent",),
        refused=PADDING,
    ),
    "lfm2": Architecture(
        "LFM2",
        "Lfm2Config",
        {**GROUPED, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
        ("convolutions", "tied head"),
    ),
    "rwkv": Architecture(
        "RWKV 4",
        "RwkvConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 48,
            "context_length": POSITIONS,
        },
        ("recurrent",),
        refused=PADDING,
    ),
    "fuyu": Architecture(
        "Fuyu, without an encoder",
        "FuyuConfig",
        SIZES,
        ("nested", "fused projections"),
        text_config="PersimmonConfig",
    ),
    "bert": Architecture(
        "BERT, RoBERTa and other encoders", "BertConfig", SIZES, ("encoder",), refused=BOTH_WAYS
    ),
}

APART = ("llama", "gpt2", "bloom", "gemma3", "qwen3_5", "mamba2", "deepseek_v3", "gpt_oss")
"""Eight that differ in kind: the first tier tries these, the second all."""


def cases(names: Iterable[str]) -> list[Any]:
    """Returns architectures as parameters of a test, those of the second tier marked."""
    return [pytest.param(name, marks=() if name in APART else pytest.mark.slow) for name in names]
