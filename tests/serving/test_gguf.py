"""Random models and adapters reply in llama.cpp as in transformers, and others are refused."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from firm.alignment.policy import without_needless_warnings
from firm.alignment.prompts import hh_text
from firm.serving.chat_templates import HH_TEMPLATE, plain_template
from firm.serving.gguf_base import TensorLayout, write_base
from firm.serving.targets import openvino
from firm.serving.targets.gguf import write_adapter
from tests.smoke import POLICY

SIZES = {
    "vocab_size": 832,  # more than there are tokens
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
}
TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Differences of log-probabilities: llama.cpp keeps keys and values as float16, and multiplies by
bfloat16 matrices with inputs in bfloat16."""


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


def adapted(config, dtype):
    """Returns a random model with a random adapter on all layers, and the adapter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=names, use_rslora=True)
    with without_needless_warnings():
        policy = get_peft_model(model, settings).eval()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy, get_peft_model_state_dict(policy)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in CONFIGS),
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
    ],
)
def test_llama_cpp_computes_as_transformers_does(kind, dtype, tokenizer, tmp_path):
    xllamacpp = pytest.importorskip("xllamacpp")
    policy, _ = adapted(CONFIGS[kind], dtype)
    config, settings = policy.config, policy.peft_config["default"]
    write_base(tmp_path / "base.gguf", policy.unload(), tokenizer)
    policy, adapter = adapted(CONFIGS[kind], dtype)  # unloading has removed the adapter
    write_adapter(tmp_path / "adapter.gguf", adapter, settings, config, name="mine")

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(tmp_path / "base.gguf"), 128, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity, params.cache_ram_mib = 0, 0
    own = xllamacpp.CommonAdapterLoraInfo()
    own.path, own.scale = str(tmp_path / "adapter.gguf"), 0.0
    params.lora_adapters, params.lora_init_without_apply = [own], True
    server = xllamacpp.Server(params)
    ids = tokenizer("Where is my ladder? It has 12 rungs.").input_ids
    policy = policy.float()
    for scale in (0.0, 1.0):
        for layer in policy.modules():
            if hasattr(layer, "set_scale"):
                layer.set_scale("default", scale)
        with torch.no_grad():
            expected = policy(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 50}
        reply = server.handle_completions({**body, "lora": [{"id": 0, "scale": scale}]})
        [first] = reply["choices"][0]["logprobs"]["content"]
        assert len(first["top_logprobs"]) == 50
        for entry in first["top_logprobs"]:
            assert abs(entry["logprob"] - expected[entry["id"]]) < TOLERANCE[dtype], entry


def test_llama_cpp_reads_texts_as_the_tokenizer_does(tokenizer, tmp_path):
    xllamacpp = pytest.importorskip("xllamacpp")
    write_base(
        tmp_path / "base.gguf", adapted(CONFIGS["llama"], torch.float32)[0].unload(), tokenizer
    )
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.verbosity = str(tmp_path / "base.gguf"), 128, 0
    server = xllamacpp.Server(params)
    for text in ("Where is my ladder?", "\n\nHuman: It has 12 rungs, doesn't it?  \n", "é ü 漢字"):
        reply = server.handle_completions({"prompt": text, "max_tokens": 1})
        assert reply["usage"]["prompt_tokens"] == len(tokenizer(text).input_ids)


def test_models_that_llama_cpp_reads_otherwise_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="llama, mistral, qwen2, got gpt2: export with --to peft"):
        TensorLayout(GPT2Config())
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
    for config, message in (
        (LlamaConfig(**SIZES, rope_parameters=scaled), "rotary scaling 'linear': convert it with"),
        (MistralConfig(**SIZES, sliding_window=64), "attends to 64 tokens only: convert it with"),
    ):
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=message):
            write_base(tmp_path / "base.gguf", model, tokenizer)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).double()
    with pytest.raises(ValueError, match=r"must be float32, bfloat16 or float16 .* got torch\.fl"):
        write_base(tmp_path / "base.gguf", model, tokenizer)
    assert not (tmp_path / "base.gguf").exists()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    other = Tokenizer.from_str(json.dumps(content))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="not a byte-level BPE"):
        write_base(
            tmp_path / "base.gguf",
            AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)),
            PreTrainedTokenizerFast(tokenizer_object=other),
        )


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "extra", "name"),
    [
        ({"rank_pattern": {"q_proj": 2}}, (), "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, (), "alpha_pattern"),
        ({"use_dora": True}, (), "use_dora True"),
        ({"modules_to_save": ["lm_head"]}, (), "modules_to_save"),
        ({"trainable_token_indices": [1]}, (), "trainable_token_indices"),
        ({"bias": "all"}, (), "bias 'all'"),
        ({"lora_bias": True}, (), "lora_bias True"),
        ({}, ("base_model.model.model.embed_tokens.lora_embedding_A",), "lora_embedding_A"),
        ({}, (f"{LAYER}.lora_magnitude_vector",), "lora_magnitude_vector"),
        ({}, ("base_model.model.lm_head.weight",), "lm_head.weight"),
        ({}, (f"{LAYER}.bias",), "q_proj.bias"),
    ],
)
def test_adapters_that_are_not_plain_are_refused_by_every_writer(tmp_path, settings, extra, name):
    adapter = {key: torch.zeros(1) for key in extra}
    own, file = LoraConfig(**settings), tmp_path / "adapter"
    with pytest.raises(ValueError, match=f"{name}.* llama.cpp takes plain LoRA adapters"):
        write_adapter(file, adapter, own, CONFIGS["llama"], name="a")
    with pytest.raises(ValueError, match=f"{name}.* OpenVINO GenAI takes plain LoRA adapters"):
        openvino.write_adapter(file, adapter, own)
    assert not file.exists()


def test_the_templates_write_prompts_as_in_training(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    options = {"tokenize": False, "add_generation_prompt": True}
    for given in (messages[1:2], messages[1:], messages):
        text = tokenizer.apply_chat_template(given, chat_template=HH_TEMPLATE, **options)
        assert text == hh_text(given)
    plain = plain_template('Say "{prompt}"!\n')
    text = tokenizer.apply_chat_template(messages, chat_template=plain, **options)
    assert text == 'Say "Bye"!\n'


def test_a_model_s_ends_are_in_its_metadata(tokenizer, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = adapted(CONFIGS["llama"], torch.float32)[0].unload()

    def ends(*given):
        write_base(tmp_path / "base.gguf", model, tokenizer, given)
        fields = gguf.GGUFReader(tmp_path / "base.gguf").fields
        keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
        return [int(fields[key].contents()) for key in keys if key in fields]

    eos = tokenizer.eos_token_id
    assert ends() == [eos]
    assert ends(eos, 7) == [eos, 7]
    assert ends(eos, 7, 9) == [eos, 7, 9]
    with pytest.raises(ValueError, match="GGUF files hold 3 tokens that end a reply, got"):
        ends(eos, 7, 9, 11)
