import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    FalconH1Config,
    LlamaConfig,
    MambaConfig,
    RobertaConfig,
    RwkvConfig,
    XLNetConfig,
)

from firm.alignment import LoraSettings, PolicyConfig, check_passes, check_rows
from firm.alignment.policy import add_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.*fast path.*")

TOKEN_IDS = torch.tensor([[4, 9, 7, 14, 5]])
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.2}
TRANSFORMER = {**SIZES, "intermediate_size": 32, "num_attention_heads": 2}
LLAMA = LlamaConfig(**TRANSFORMER, num_key_value_heads=1, attention_dropout=0.5)
HYBRID = FalconH1Config(
    **TRANSFORMER, num_key_value_heads=1, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_state=4,
    mamba_d_head=8, mamba_chunk_size=8,
)  # fmt: skip


def adapted(model):
    settings = LoraSettings(r=2, dropout=0.5, target_modules=None)
    policy = add_adapter(model, PolicyConfig(path="it", lora=settings))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    return policy


def make(config, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options)


@pytest.mark.parametrize("config", [LLAMA, HYBRID, MambaConfig(**SIZES, state_size=4)])
def test_models_that_honour_masks_pass_and_are_left_as_they_were(config):
    policy = adapted(make(config))
    check_passes(policy, "it")
    assert not any(module.training for module in policy.modules())
    with_adapter = policy(input_ids=TOKEN_IDS).logits
    with policy.disable_adapter():
        assert not torch.allclose(policy(input_ids=TOKEN_IDS).logits, with_adapter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype):
    check_passes(adapted(make(LLAMA, dtype=dtype)), "it")


@pytest.mark.parametrize(
    "config",
    [
        RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, context_length=64),
        BartConfig(
            vocab_size=32,
            d_model=16,
            decoder_layers=2,
            decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=64,
            init_std=0.5,
        ),
    ],
)
def test_a_model_that_reads_masked_tokens_is_refused_in_one_line(config):
    reason = r"the log-probabilities of it do not match .*: padding on the left has an effect"
    with pytest.raises(ValueError, match=reason) as error:
        check_passes(adapted(make(config)), "it")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize("kind", [BertConfig, RobertaConfig])
def test_a_model_that_reads_what_follows_is_refused_trained_or_not(kind, scale):
    """Weights of 0.02 as they are drawn make all tokens nearly alike, and differences small."""
    config = kind(**{**TRANSFORMER, "initializer_range": scale}, max_position_embeddings=64)
    with pytest.raises(ValueError, match="token by token and one forward pass differ, by"):
        check_passes(adapted(make(config)), "it")


def test_a_model_that_takes_no_masks_is_refused_in_one_line():
    model = make(XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=32))
    settings = LoraSettings(r=2, target_modules=["layer_1"])
    policy = add_adapter(model, PolicyConfig(path="it", lora=settings))
    reason = r"^policy.path: it does not run as a causal language model \(Subtraction, .*\): choose"
    with pytest.raises(ValueError, match=reason) as error:
        check_passes(policy, "it")
    assert "\n" not in str(error.value)


def test_float32_in_tensor_cores_may_round_as_float16():
    def rounded(module, inputs, output):
        return output * (1 + 1e-3 * torch.randn_like(output))

    model = make(LLAMA, dtype=torch.float32)
    model.lm_head.register_forward_hook(rounded)
    policy, matmul = adapted(model), torch.backends.cuda.matmul
    with pytest.raises(
        ValueError, match=r"by 0\.00\d+ of their spread, .* explains 0\.0001; choose"
    ):
        check_passes(policy, "it")
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        check_passes(policy, "it")
    finally:
        matmul.allow_tf32 = before


def test_dropout_that_no_mode_switches_off_is_found():
    model = make(LLAMA)

    def noise(module, inputs, output):
        return torch.nn.functional.dropout(output, 0.1)  # PyTorch's default: in training

    model.model.norm.register_forward_hook(noise)
    with pytest.raises(
        ValueError, match="two passes over the same tokens differ, so it uses random"
    ):
        check_passes(adapted(model), "it")


def test_a_base_model_in_training_mode_is_found(monkeypatch):
    def as_before(policy, *, is_training):
        policy.train(is_training)

    policy = adapted(make(LLAMA))
    monkeypatch.setattr("firm.alignment.self_check.set_mode", as_before)
    with pytest.raises(ValueError, match="two passes over the same tokens differ"):
        check_passes(policy, "it")


@pytest.mark.parametrize(
    "order",
    [
        lambda mask: torch.arange(len(mask)).flip(0),
        lambda mask: mask.sum(1).argsort(stable=True),
        lambda mask: mask.sum(1).argsort(stable=True, descending=True),
    ],
    ids=["reversed", "shortest first", "longest first"],
)
def test_rows_that_a_model_reorders_inside_are_refused(order):
    policy = adapted(make(LLAMA))
    check_rows(policy, "it")
    model, masks = policy.get_base_model().model, []
    model.register_forward_pre_hook(
        lambda module, inputs, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    layer = model.layers[1].self_attn.v_proj
    forward = layer.forward

    def reordered(x):
        index = order(masks[-1])
        return forward(x[index])[index.argsort()]

    layer.forward = reordered
    check_passes(policy, "it")  # its probabilities are right all the same
    with pytest.raises(ValueError, match="the rows of a batch of it are not independent"):
        check_rows(policy, "it")
