import shutil

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer, BloomConfig

from firm.alignment.adapter_files import load_adapters, select_adapter
from firm.alignment.adapters.lora import LoraSettings
from firm.alignment.policy import (
    adapter_parameters,
    check_context,
    check_vocabulary,
    copy_adapter,
    load_adapter_,
    load_base_model,
    load_policy,
    load_tokenizer,
    take_device,
)
from firm.alignment.policy_config import PolicyConfig
from firm.alignment.prompts import PromptFormat
from firm.federation import RandomStream

TOKEN_IDS = torch.tensor([[4, 9, 7, 14, 5], [8, 8, 4, 6, 10]])


def load(checkpoint, *, seed: int = 0, dtype="float32", **lora):
    config = PolicyConfig(path=str(checkpoint), dtype=dtype, lora=LoraSettings(**lora))
    return load_policy(config, stream=RandomStream(seed, "adapter"))


@pytest.fixture(scope="module")
def fresh(checkpoint):
    """A policy as it is loaded; tests leave it as it is."""
    return load(checkpoint, r=2, alpha=6)


@pytest.fixture
def tokenizer_folder(tmp_path, make_tokenizer):
    def save(**special_tokens):
        make_tokenizer(**special_tokens).save_pretrained(tmp_path)
        return str(tmp_path)

    return save


def test_a_checkpoint_s_own_pad_token_stays(tokenizer_folder):
    tokenizer = load_tokenizer(PolicyConfig(path=tokenizer_folder()))
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")


def test_padding_may_be_any_token_that_there_is(tokenizer_folder):
    """None is added: a text that spells it out would have no embedding."""
    for options, expected in (
        ({"pad_token": None}, "</s>"),
        ({"pad_token": "</s>"}, "</s>"),
        ({"pad_token": None, "eos_token": None}, "<unk>"),
        ({"pad_token": None, "eos_token": None, "unk_token": None}, "<pad>"),
    ):
        folder = tokenizer_folder(**options)
        before = AutoTokenizer.from_pretrained(folder)
        tokenizer = load_tokenizer(PolicyConfig(path=folder))
        assert tokenizer.pad_token == expected
        assert len(tokenizer) == len(before)
        assert tokenizer.eos_token_id == before.eos_token_id


def test_a_broken_chat_template_is_refused_where_it_is_used(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^the chat template of {tmp_path} is broken \(line 1: "):
        load_tokenizer(PolicyConfig(path=str(tmp_path)))
    load_tokenizer(PolicyConfig(path=str(tmp_path), prompt=PromptFormat("hh")))


def test_prompts_are_padded_and_truncated_on_the_left(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(PolicyConfig(path=str(tmp_path)))
    ids = tokenizer(["a", "bcde"], padding=True, truncation=True, max_length=2)["input_ids"]
    assert ids == [[0, 4], [7, 8]]


def test_only_the_adapter_is_trainable(fresh):
    trainable = {name for name, p in fresh.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in fresh.named_parameters() if "lora_" in name}
    # two layers; rank 2 times (in + out) for q and o (16 to 16), k and v (16 to 8)
    sizes = [p.numel() for p in adapter_parameters(fresh).values()]
    assert sum(sizes) == 2 * 2 * (32 + 24 + 24 + 32)


def test_target_modules_choose_the_layers_with_an_adapter(checkpoint):
    policy = load(checkpoint, target_modules=["down_proj", "k_proj"])
    layers = {name.rsplit(".", 3)[-3] for name in adapter_parameters(policy)}
    assert layers == {"down_proj", "k_proj"}


def test_a_fresh_adapter_changes_nothing(fresh, make_model):
    with torch.no_grad():
        logits = fresh.eval()(input_ids=TOKEN_IDS).logits
        assert torch.equal(logits, make_model()(input_ids=TOKEN_IDS).logits)


def test_the_update_is_b_times_a_times_alpha_over_r(checkpoint, make_model):
    policy = load(checkpoint, r=2, alpha=6, target_modules=["v_proj"]).eval()
    parameters = adapter_parameters(policy)
    base = make_model()
    with torch.no_grad():
        for i, layer in enumerate(base.model.layers):
            prefix = f"base_model.model.model.layers.{i}.self_attn.v_proj.lora_"
            a, b = parameters[f"{prefix}A.weight"], parameters[f"{prefix}B.weight"]
            torch.nn.init.normal_(b, generator=torch.Generator().manual_seed(i))
            layer.self_attn.v_proj.weight += 3 * b @ a  # alpha / r = 6 / 2
        ours = policy(input_ids=TOKEN_IDS).logits
        torch.testing.assert_close(ours, base(input_ids=TOKEN_IDS).logits, rtol=1e-4, atol=1e-4)


def test_equal_streams_draw_equal_adapters_whatever_was_drawn_before(checkpoint):
    def drawn(seed, noise):
        torch.manual_seed(noise)
        return copy_adapter(adapter_parameters(load(checkpoint, seed=seed)))

    first, again, other = drawn(0, 1), drawn(0, 2), drawn(1, 1)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name]) == ("lora_B" in name)


def test_with_a_frozen_b_alone_is_trainable_and_a_is_the_one_that_is_always_drawn(checkpoint):
    frozen, free = (load(checkpoint, freeze_a=value) for value in (True, False))
    parameters, all_of_them = adapter_parameters(frozen), adapter_parameters(free)
    assert list(parameters) == [name for name in all_of_them if "lora_B" in name]
    ours = {name: p for name, p in frozen.named_parameters() if "lora_A" in name}
    theirs = {name: p for name, p in free.named_parameters() if "lora_A" in name}
    assert ours.keys() == theirs.keys()
    for name, matrix in ours.items():
        assert torch.equal(matrix, theirs[name])
        assert matrix.any()


def test_a_frozen_a_stays_frozen_when_the_adapter_was_off(checkpoint):
    policy = load(checkpoint, freeze_a=True)
    before = list(adapter_parameters(policy))
    with policy.disable_adapter():  # at its end peft makes adapters trainable
        policy(input_ids=TOKEN_IDS)
    assert list(adapter_parameters(policy)) == before


def test_an_adapter_with_a_frozen_is_saved_whole(checkpoint, tmp_path):
    policy = load(checkpoint, freeze_a=True)
    for parameter in adapter_parameters(policy).values():
        torch.nn.init.normal_(parameter)
    policy.save_pretrained(tmp_path / "adapter")
    in_file = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert sum("lora_A" in name for name in in_file) == len(adapter_parameters(policy))
    config = PolicyConfig(path=str(checkpoint))
    again = load_adapters(config, [tmp_path / "adapter"], check_base=False)
    with torch.no_grad(), select_adapter(again, 0):
        logits = again(input_ids=TOKEN_IDS.to(again.device)).logits.cpu()
    torch.testing.assert_close(logits, policy.eval()(input_ids=TOKEN_IDS).logits.detach())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frozen_parameters_have_the_configured_type_and_the_adapter_is_float32(checkpoint, dtype):
    policy = load(checkpoint, dtype=dtype)
    frozen = {p.dtype for p in policy.parameters() if not p.requires_grad}
    assert frozen == {getattr(torch, dtype)}
    assert {p.dtype for p in adapter_parameters(policy).values()} == {torch.float32}


def test_target_modules_that_match_nothing_are_an_error_that_names_candidates(checkpoint):
    with pytest.raises(ValueError, match=r"\['c_attn'\] match no layer of .*choose among") as error:
        load(checkpoint, target_modules=["q_proj", "c_attn"])
    candidates = str(error.value).rpartition("choose among ")[2]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert repr(name) in candidates
    assert "norm" not in candidates


def test_adapter_parameters_have_the_names_of_a_peft_file_and_are_the_live_ones(fresh):
    parameters, in_file = adapter_parameters(fresh), get_peft_model_state_dict(fresh)
    assert parameters.keys() == in_file.keys()
    live = {id(parameter) for parameter in fresh.parameters()}
    for name, parameter in parameters.items():
        assert torch.equal(parameter, in_file[name])
        assert id(parameter) in live


def test_an_adapter_survives_copying_and_loading_bit_for_bit(make_policy, make_model):
    source = adapter_parameters(make_policy())
    adapter = copy_adapter(source)
    assert list(adapter) == list(source)
    target = adapter_parameters(make_policy())
    places = [parameter.data_ptr() for parameter in target.values()]
    for parameter in target.values():
        torch.nn.init.zeros_(parameter)
    load_adapter_(target, adapter)
    for name, parameter in target.items():
        assert torch.equal(parameter, source[name])
        assert parameter.requires_grad
        assert not adapter[name].requires_grad
    assert places == [parameter.data_ptr() for parameter in target.values()]


def test_a_copied_adapter_is_a_clone_in_both_directions(make_policy):
    parameters = adapter_parameters(make_policy())
    adapter = copy_adapter(parameters)
    kept = {name: tensor.clone() for name, tensor in adapter.items()}
    for parameter in parameters.values():
        torch.nn.init.ones_(parameter)
    for name in adapter:
        assert torch.equal(adapter[name], kept[name])
    load_adapter_(parameters, adapter)
    for tensor in adapter.values():
        tensor.zero_()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, kept[name])


def test_an_optimizer_stays_bound_when_an_adapter_is_loaded(make_policy):
    parameters = adapter_parameters(make_policy())
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    adapter = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    load_adapter_(parameters, adapter)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters.values():
        assert torch.equal(parameter, -torch.ones_like(parameter))


@pytest.mark.parametrize("change", ["missing", "additional"])
def test_an_adapter_with_other_names_is_refused(make_policy, change):
    parameters = adapter_parameters(make_policy())
    adapter = copy_adapter(parameters)
    if change == "missing":
        odd = next(iter(adapter))
        del adapter[odd]
    else:
        odd = "layers.9.lora_A.weight"
        adapter[odd] = torch.zeros(1)
    with pytest.raises(ValueError, match=f"1 names exist on one side only, such as '{odd}'"):
        load_adapter_(parameters, adapter)


def test_an_adapter_of_another_rank_is_refused(make_policy):
    parameters = adapter_parameters(make_policy())
    adapter = copy_adapter(parameters)
    first = next(iter(adapter))
    adapter[first] = adapter[first][:1]  # this would broadcast
    with pytest.raises(ValueError, match=r"has shape \[1, 16\], expected \[4, 16\]: use the rank"):
        load_adapter_(parameters, adapter)


def test_a_policy_is_loaded_with_the_configured_dropout(checkpoint):
    policy = load(checkpoint, dropout=0.25, target_modules=["q_proj"])
    dropouts = [m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts == [0.25, 0.25]  # one per layer


def test_adapter_dropout_is_active_in_training_mode_alone(make_policy):
    policy = make_policy(dropout=0.5)

    @torch.no_grad()
    def logits():
        return policy(input_ids=TOKEN_IDS).logits

    plain = logits()
    assert torch.equal(logits(), plain)
    policy.train()
    assert not torch.allclose(logits(), plain)


def test_the_default_adapter_is_the_paper_s():
    settings = LoraSettings()
    assert (settings.r, settings.alpha, settings.dropout) == (16, 32, 0.05)
    assert settings.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "^r must be at least 1, got 0"),
        ({"dropout": 1.0}, r"^dropout must be at least 0 and less than 1, got 1.0"),
        ({"dropout": -0.1}, r"^dropout must be at least 0 and less than 1, got -0.1"),
    ],
)
def test_an_adapter_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(**changes)


def test_a_refused_adapter_leaves_the_policy_as_it_was(make_policy):
    parameters = adapter_parameters(make_policy())
    before = copy_adapter(parameters)
    adapter = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    last = list(adapter)[-1]
    adapter[last] = adapter[last][:1]
    with pytest.raises(ValueError, match="use the rank"):
        load_adapter_(parameters, adapter)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])


def test_candidates_of_gpt2_include_its_layers(make_model, tmp_path):
    make_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="choose among") as error:
        load_policy(PolicyConfig(path=str(tmp_path)), stream=RandomStream(0))
    assert "c_attn" in str(error.value)


@pytest.mark.parametrize("load", [load_tokenizer, load_base_model])
def test_a_checkpoint_out_of_reach_says_how_to_give_a_local_one(load):
    for path in ("no/such/folder", "some/name"):
        with pytest.raises(
            ValueError,
            match=rf"there is no folder {path}, .* choose the folder of a local checkpoint",
        ) as error:
            load(PolicyConfig(path=path))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damaged", "what", "load"),
    [
        ("tokenizer.json", "tokenizer", load_tokenizer),
        ("model.safetensors", "language model", load_base_model),
        ("config.json", "language model", load_base_model),
    ],
)
@pytest.mark.parametrize("damage", ["torn", "missing"])
def test_a_damaged_checkpoint_is_an_error_of_one_line(
    checkpoint, tmp_path, damaged, what, load, damage
):
    folder = shutil.copytree(checkpoint, tmp_path / "policy")
    content = (folder / damaged).read_bytes()
    (folder / damaged).unlink()
    if damage == "torn":
        (folder / damaged).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"no {what} could be loaded from the folder") as error:
        load(PolicyConfig(path=str(folder)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "text", "load"),
    [
        ("tokenizer.json", "[]", load_tokenizer),
        ("tokenizer.json", '{"version": "1.0"}', load_tokenizer),
        ("tokenizer_config.json", "[" * 100_000, load_tokenizer),
        ("tokenizer_config.json", "[]", load_tokenizer),
        ("config.json", "[" * 100_000, load_base_model),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', load_base_model),
    ],
)
def test_a_file_of_another_making_is_an_error_of_one_line(checkpoint, tmp_path, file, text, load):
    folder = shutil.copytree(checkpoint, tmp_path / "policy")
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match="could be loaded from the folder") as error:
        load(PolicyConfig(path=str(folder)))
    assert "\n" not in str(error.value)


def test_a_model_of_which_a_part_is_missing_is_refused(checkpoint, tmp_path, make_model):
    folder = shutil.copytree(checkpoint, tmp_path / "policy")
    model = make_model()
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(
        ValueError, match=r"is not a complete language model, .*up_proj.* is missing"
    ):
        load_base_model(PolicyConfig(path=str(folder)))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_prompt_and_reply_must_fit_into_the_context(tmp_path, make_model, architecture):
    make_model(architecture).save_pretrained(tmp_path)
    config = PolicyConfig(path=str(tmp_path))
    check_context(config, max_prompt_tokens=40, max_new_tokens=24)
    with pytest.raises(ValueError, match=r"fit into the 64 positions of .* got 40 \+ 25: lower"):
        check_context(config, max_prompt_tokens=40, max_new_tokens=25)


def test_a_model_without_positions_takes_any_length(tmp_path):
    BloomConfig(vocab_size=15, hidden_size=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    check_context(PolicyConfig(str(tmp_path)), max_prompt_tokens=10**6, max_new_tokens=10**6)


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(make_policy, make_tokenizer):
    policy, tokenizer = make_policy(), make_tokenizer()
    check_vocabulary(policy, tokenizer, "the tokenizer of models/a")
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=r"of models/a has ids up to 15, but .* has 15 rows"):
        check_vocabulary(policy, tokenizer, "the tokenizer of models/a")


def test_a_rank_beyond_every_matrix_is_refused_before_it_takes_memory(checkpoint):
    config = PolicyConfig(path=str(checkpoint), lora=LoraSettings(r=10**6))
    with pytest.raises(ValueError, match=r"policy\.lora\.r must be at most 16, .* got 1000000"):
        load_policy(config, stream=RandomStream(0))


def test_an_absent_device_is_refused_with_those_there_are():
    take_device("auto")
    take_device("cpu", num_processes=2)
    with pytest.raises(
        ValueError, match=r"policy.device: there is no device 'cuda:99' here: choose .*cpu"
    ):
        take_device("cuda:99")


def test_pickled_weights_are_refused_in_one_line(make_model, tmp_path):
    model = make_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no language model could be loaded .*safetensors") as it:
        load_base_model(PolicyConfig(str(tmp_path)))
    assert "\n" not in str(it.value)
