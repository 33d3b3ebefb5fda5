import json
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BloomConfig,
    DeepseekV3Config,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    OPTConfig,
    Qwen2VLConfig,
)

from firm.alignment import (
    LoraSettings,
    PolicyConfig,
    default_target_modules,
    fill_adapter_,
    load_adapters,
    load_base_model,
    save_adapter,
)
from firm.alignment.policy import adapter_parameters, add_adapter, without_needless_warnings

TOKEN_IDS = torch.tensor([[4, 9, 7, 14, 5]])

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS = {
    "llama": LlamaConfig(**TEXT),
    "gpt2": GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2),
    "bloom": BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2),
    "gpt_neox": GPTNeoXConfig(**{k: v for k, v in TEXT.items() if k != "num_key_value_heads"}),
    "opt": OPTConfig(
        vocab_size=32,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    ),
    "mamba": MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4),
}
MULTIMODAL = {
    "gemma3": Gemma3Config(
        text_config={**TEXT, "head_dim": 8},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=3,
    ),
    "qwen2_vl": Qwen2VLConfig(
        text_config={**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
    ),
    "llava": LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 16},
    ),
}


def make(config) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if config.sub_configs else AutoModelForCausalLM
    return kind.from_config(config).eval()


def read_by_peft(model, folder) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, at any PeftModel
        return PeftModel.from_pretrained(model, folder).eval()


def adapted(model, target_modules, **lora):
    settings = LoraSettings(r=2, target_modules=target_modules, **lora)
    return add_adapter(model, PolicyConfig(path="a model", lora=settings))


@pytest.mark.parametrize(
    ("name", "target_modules"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("gpt2", ["c_attn"]),
        ("bloom", ["query_key_value"]),
        ("gpt_neox", ["query_key_value"]),
        ("opt", ["q_proj", "v_proj"]),
        ("mamba", ["in_proj", "x_proj"]),
    ],
)
def test_the_default_is_attention_or_peft_s_choice_or_every_linear_layer(name, target_modules):
    assert default_target_modules(CONFIGS[name]) == target_modules
    policy = adapted(make(CONFIGS[name]), None)
    in_names = {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in adapter_parameters(policy)}
    assert in_names == set(target_modules)


def test_names_that_match_nothing_are_refused_with_the_default_of_the_model():
    with pytest.raises(ValueError, match=r"\['q_proj'\] match no layer of a model: ch") as error:
        adapted(make(CONFIGS["gpt2"]), ["q_proj"])
    message = str(error.value)
    assert message.endswith("or give null, which takes ['c_attn'].")
    assert "lm_head" not in message  # it is tied
    assert "\n" not in message


def test_an_adapter_of_transposed_layers_says_so_and_peft_does_not_warn(tmp_path):
    policy = adapted(make(CONFIGS["gpt2"]), ["c_attn"])
    save_adapter(policy, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    read_by_peft(make(CONFIGS["gpt2"]), tmp_path)
    adapted(make(CONFIGS["gpt2"]), ["c_attn", "c_fc"])
    adapted(make(CONFIGS["llama"]), ["q_proj"])


def test_transposed_layers_beside_others_give_no_warning():
    config = GPT2Config(**{**CONFIGS["gpt2"].to_dict(), "tie_word_embeddings": False})
    adapted(make(config), ["c_attn", "lm_head"])


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_a_tied_head_is_refused_in_one_line(name):
    config = LlamaConfig(**TEXT, tie_word_embeddings=True)
    reason = "is tied to another layer" if name == "lm_head" else "must name linear layers"
    with pytest.raises(ValueError, match=f"policy.lora.target_modules: '{name}' {reason}") as error:
        adapted(make(config), ["q_proj", name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "kind"), [("mlp", "LlamaMLP"), ("embed_tokens", "Embedding")])
def test_what_is_not_linear_is_refused(name, kind):
    with pytest.raises(ValueError, match=rf"'{name}' must name linear .* is of type {kind}: leave"):
        adapted(make(CONFIGS["llama"]), [name])


DEEPSEEK = DeepseekV3Config(
    **{**TEXT, "num_key_value_heads": 2},
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
)
"""PEFT takes the projections of its experts, which are stacked in one parameter, for that."""


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # PEFT's own
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_stacked_experts_get_no_adapter(dropout):
    def adapted(names):
        lora = LoraSettings(r=2, dropout=dropout, target_modules=names)
        return add_adapter(
            AutoModelForCausalLM.from_config(DEEPSEEK), PolicyConfig("it", lora=lora)
        )

    assert "gate_proj" not in default_target_modules(DEEPSEEK)
    assert not adapted(None).peft_config["default"].target_parameters
    with pytest.raises(
        ValueError, match=r"^policy.lora.target_modules: .* in it \(.*\): name"
    ) as end:
        adapted(["gate_proj", "up_proj", "down_proj"])
    assert "\n" not in str(end.value)


def test_the_end_of_a_dotted_name_is_enough():
    policy = adapted(make(CONFIGS["llama"]), ["layers.1.self_attn.q_proj"])
    assert {"layers.1.self_attn.q_proj" in name for name in adapter_parameters(policy)} == {True}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_only_the_language_model_of_a_multimodal_model_is_adapted(name, tmp_path):
    policy = adapted(make(MULTIMODAL[name]), ["q_proj", "v_proj"])
    parameters = adapter_parameters(policy)
    assert len(parameters) == 2 * 2 * 2  # two layers, two projections, A and B
    assert all(".language_model." in key for key in parameters)
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter)
    save_adapter(policy, tmp_path)
    by_peft = read_by_peft(make(MULTIMODAL[name]), tmp_path)
    with torch.no_grad():
        ours, theirs = (model(input_ids=TOKEN_IDS).logits for model in (policy.eval(), by_peft))
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, make(MULTIMODAL[name])(input_ids=TOKEN_IDS).logits)


@pytest.mark.parametrize("kind", ["lora", "lora_xs"])
def test_an_adapted_head_is_trained_saved_loaded_and_merged_alike(kind, tmp_path):
    make(CONFIGS["llama"]).save_pretrained(tmp_path / "base")
    lora = LoraSettings(r=2, target_modules=["q_proj", "lm_head"])
    config = PolicyConfig(path=str(tmp_path / "base"), adapter=kind, lora=lora)
    policy = add_adapter(load_base_model(config), config)
    optimizer = torch.optim.SGD(adapter_parameters(policy).values(), lr=0.1)
    for _ in range(3):
        policy(input_ids=TOKEN_IDS, labels=TOKEN_IDS).loss.backward()
        optimizer.step()
    logits = policy(input_ids=TOKEN_IDS).logits
    save_adapter(policy, tmp_path / "adapter")
    again = add_adapter(load_base_model(config), config)
    fill_adapter_(again, tmp_path / "adapter", config.path)
    loaded = load_adapters(config, [tmp_path / "adapter"]).cpu()
    by_peft = read_by_peft(load_base_model(config), tmp_path / "adapter")
    for model in (again, loaded, by_peft, by_peft.merge_and_unload()):
        torch.testing.assert_close(model(input_ids=TOKEN_IDS).logits, logits)
    base = load_base_model(config)
    assert not torch.allclose(base(input_ids=TOKEN_IDS).logits, logits, atol=1e-3)


@pytest.mark.parametrize("names", [["lm_head"], ["q_proj", "embed_tokens"]])
@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True:UserWarning")
def test_an_adapter_that_peft_made_of_a_tied_head_is_loaded(names, tmp_path):
    make(LlamaConfig(**TEXT, tie_word_embeddings=True)).save_pretrained(tmp_path / "base")
    config = PolicyConfig(path=str(tmp_path / "base"))
    settings = LoraConfig("CAUSAL_LM", r=2, target_modules=names, init_lora_weights=False)
    with without_needless_warnings():
        policy = get_peft_model(load_base_model(config), settings).eval()
    policy.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    loaded = load_adapters(config, [tmp_path / "adapter"], check_base=False).cpu()
    logits = policy(input_ids=TOKEN_IDS).logits
    torch.testing.assert_close(loaded(input_ids=TOKEN_IDS).logits, logits)
    other = load_base_model(config)
    other.get_input_embeddings().weight.data += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"base_layer.weight differs from the base model's: use an ad"
    ):
        load_adapters(
            PolicyConfig(path=str(tmp_path / "other")), [tmp_path / "adapter"], check_base=False
        )
