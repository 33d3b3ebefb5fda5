"""GGUF files for llama.cpp: base models, and names of tensors."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from firm.base.extras import install_command

_USE_OTHER = "convert it with llama.cpp's convert_hf_to_gguf.py, and pass --base FILE.gguf."
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS = {
    "gpt-2": _BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
}
"""Pre-tokenizers as tokenizer.json defines them, by llama.cpp's names."""
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
"""Supported architectures of GGUF files, by the model type of transformers."""
_PERMUTED = "llama"
"""Architecture whose query and key rows are reordered: llama.cpp rotates neighbouring rows, and
transformers rows that are half a head apart."""


def import_gguf() -> Any:
    """Returns the package gguf.

    Raises:
        ModuleNotFoundError: When it is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"GGUF files need the package gguf: {install_command('serve')}.", name="gguf"
        ) from None
    return gguf


class TensorLayout:
    """Names and row orders of a model's tensors in GGUF files, as llama.cpp's converter has them.

    Args:
        config: The model's configuration.

    Raises:
        ValueError: When the architecture is not supported.
        ModuleNotFoundError: When the package gguf is not installed.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        gguf = import_gguf()
        if config.model_type not in ARCHITECTURES:
            raise ValueError(
                f"GGUF files are written for models of type {', '.join(ARCHITECTURES)}, got "
                f"{config.model_type}: export with --to peft, and convert with llama.cpp's "
                "convert_lora_to_gguf.py."
            )
        self.architecture = ARCHITECTURES[config.model_type]
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(kinds[self.architecture], config.num_hidden_layers)
        self._num_heads = {
            "q_proj": config.num_attention_heads,
            "k_proj": config.num_key_value_heads,
        }

    def name(self, own: str) -> str:
        """Returns the GGUF name of a tensor of transformers, such as "model.norm.weight".

        Raises:
            ValueError: When it has none.
        """
        found = self._names.get_name(own, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"{own} has no name in GGUF files of {self.architecture}.")
        return found

    def rows(self, own: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor with this name of transformers, with its rows in GGUF's order."""
        layer = own.split(".")[-2]
        if self.architecture != _PERMUTED or layer not in self._num_heads:
            return tensor
        return permute_rows(tensor, self._num_heads[layer])


def write_base(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int] = (),
) -> None:
    """Writes a language model and its tokenizer as a GGUF file.

    Matrices keep the model's dtype; vectors are float32, as llama.cpp needs them.

    Args:
        file: File to write.
        model: The model.
        tokenizer: Its tokenizer.
        end_ids: Tokens that end a reply, at most three; by default the tokenizer's EOS.

    Raises:
        ValueError: When this function does not know the architecture, the rotary scaling or the
            tokenizer in GGUF files.
        ModuleNotFoundError: When the package gguf is not installed.
    """
    gguf, config, layout = import_gguf(), model.config, TensorLayout(model.config)
    writer = gguf.GGUFWriter(str(file), layout.architecture)
    _add_sizes(writer, config)
    _add_tokenizer(writer, gguf.TokenType, tokenizer, config.vocab_size)
    _add_ends(writer, tokenizer, end_ids)
    for name, values, dtype in _tensors(model, layout):
        kind = getattr(gguf.GGMLQuantizationType, dtype)
        writer.add_tensor(name, values, raw_shape=None, raw_dtype=kind)
    finish(writer)


def finish(writer: Any) -> None:
    """Writes what a writer has been given, and closes it."""
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _add_sizes(writer: Any, config: PretrainedConfig) -> None:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"the model has the rotary scaling {rope['rope_type']!r}: {_USE_OTHER}")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        raise ValueError(f"the model attends to {window} tokens only: {_USE_OTHER}")
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_name("base")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(
    writer: Any, kinds: Any, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else {}
    model, split = content.get("model") or {}, content.get("pre_tokenizer")
    found = [name for name, own in _PRE_TOKENIZERS.items() if own == split]
    if model.get("type") != "BPE" or not found or content.get("normalizer"):
        raise ValueError(
            "the tokenizer is not a byte-level BPE with a pre-tokenizer of "
            f"{' or '.join(_PRE_TOKENIZERS)}: {_USE_OTHER}"
        )
    tokens = {index: token for token, index in model["vocab"].items()}
    types = dict.fromkeys(tokens, kinds.NORMAL)
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(found[0])
    # rows of the embedding without a token, which pad it to a round size
    ids = range(vocab_size)
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in ids])
    writer.add_token_types([types.get(index, kinds.UNUSED) for index in ids])
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    writer.add_token_merges(list(merges))
    for name in ("bos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    first = tokenizer("a").input_ids[0]
    writer.add_add_bos_token(first == tokenizer.bos_token_id)
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _add_ends(writer: Any, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> None:
    """Adds the tokens at which llama.cpp ends a reply: end of text, of a turn and of a message."""
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
    ends = list(end_ids or own)
    adds = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    if len(ends) > len(adds):
        words = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ends)))
        raise ValueError(
            f"GGUF files hold {len(adds)} tokens that end a reply, got {words}: {_USE_OTHER}"
        )
    for add, token in zip(adds, ends, strict=False):
        add(token)


def _tensors(model: PreTrainedModel, layout: TensorLayout) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yields the tensors with their names and dtypes in GGUF files."""
    for own, tensor in model.state_dict().items():
        if (
            model.config.tie_word_embeddings and own == "lm_head.weight"
        ):  # llama.cpp then uses the embedding
            continue
        tensor = layout.rows(own, tensor.cpu()).contiguous()
        if tensor.ndim == 1 or tensor.dtype == torch.float32:
            yield layout.name(own), tensor.float().numpy(), "F32"
        elif tensor.dtype == torch.bfloat16:  # as bytes, since numpy has no bfloat16
            yield layout.name(own), tensor.view(torch.uint8).numpy(), "BF16"
        elif tensor.dtype == torch.float16:
            yield layout.name(own), tensor.numpy(), "F16"
        else:
            raise ValueError(
                f"{own} must be float32, bfloat16 or float16 in a GGUF file, got {tensor.dtype}: "
                "convert the model."
            )


def permute_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns a tensor with the rows of each head interleaved from its two halves.

    >>> permute_rows(torch.arange(8.0), 2).tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    halves = tensor.unflatten(0, (num_heads, 2, tensor.size(0) // num_heads // 2))
    return halves.transpose(1, 2).reshape(tensor.shape)
