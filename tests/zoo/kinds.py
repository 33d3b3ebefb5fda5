"""Tokenizers that differ in padding, special tokens, ends and chat templates."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<pad>", "<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
"""Tokens beside the 256 bytes, ids 0 to 9 in every kind."""

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Adds a system turn where there is none, as SmolLM2's does."""

TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}\n{% endif %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% elif messages[0]['role'] == 'system' %}<|im_start|>system\n"
    "{{ messages[0]['content'] }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|im_start|>user\n<r>{{ m['content'] }}</r>"
    "<|im_end|>\n{% elif m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<c>{{ c['function'] | tojson }}</c>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<t></t>{% endif %}{% endif %}"
)
"""Writes tools, calls and results, and takes an option, as Qwen's does."""

HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
"""Spells BOS out and trims, as Llama 3's does."""

ALTERNATING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Refuses a system turn and turns that do not alternate, as Gemma's does."""


@dataclass(frozen=True)
class Kind:
    """One way of tokenizing."""

    what: str
    """As the table says it."""
    like: str
    """Whose tokenizer it is like."""
    special: Mapping[str, str] = field(default_factory=dict)
    """Roles of special tokens: `pad_token`, `bos_token`, `eos_token`, `unk_token`."""
    frame: str = "$A"
    """What the tokenizer puts around a text."""
    template: str | None = None
    """Its chat template."""
    more_ends: tuple[str, ...] = ()
    """Ends of the model's generation_config beside EOS."""
    has_all_bytes: bool = True
    """Whether it knows more than ASCII."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Returns the tokenizer."""
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        if not self.has_all_bytes:
            letters = [letter for letter in letters if letter.isascii()] + ["Ġ", "Ċ"]
        vocabulary = {token: i for i, token in enumerate([*SPECIAL, *letters])}
        unknown = {} if self.has_all_bytes else {"unk_token": "<unk>"}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], **unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        if self.frame != "$A":
            ids = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=self.frame, special_tokens=ids
            )
        loaded = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            additional_special_tokens=[t for t in SPECIAL if t not in self.special.values()],
            **self.special,
        )
        loaded.chat_template = self.template
        return loaded

    def ends(self, tokenizer: PreTrainedTokenizerFast) -> list[int]:
        """Returns the ids that end a reply in the model's generation_config."""
        first = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return first + [SPECIAL.index(token) for token in self.more_ends]


BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}
END_OF_TURN = {
    "pad_token": "<|im_end|>",
    "eos_token": "<|im_end|>",
    "bos_token": "<|im_start|>",
    "unk_token": "<|endoftext|>",
}
ONE = dict.fromkeys(("pad_token", "bos_token", "eos_token", "unk_token"), "<|endoftext|>")
KINDS: dict[str, Kind] = {
    "own_pad": Kind(
        "a pad token that is nothing else, no BOS added",
        "many fine-tuned GPT-NeoX",
        {**BOS_EOS, "pad_token": "<pad>"},
    ),
    "no_pad": Kind("no pad token, BOS added", "Llama 2", BOS_EOS, "<s> $A"),
    "pad_is_eos": Kind(
        "pad = EOS, and a template that adds a system turn", "SmolLM2", END_OF_TURN, template=CHATML
    ),
    "one_special": Kind("pad = BOS = EOS = UNK", "GPT-2", ONE),
    "pad_is_bos": Kind(
        "pad = BOS, BOS added", "", {**BOS_EOS, "pad_token": "<s>"}, "<s> $A", template=HEADERS
    ),
    "pad_is_unk": Kind(
        "pad = UNK, and an incomplete vocabulary",
        "Llama 2 as often fine-tuned",
        {**BOS_EOS, "pad_token": "<unk>", "unk_token": "<unk>"},
        "<s> $A",
        has_all_bytes=False,
    ),
    "eos_appended": Kind(
        "EOS appended to texts",
        "XGLM, OPT's relatives",
        {**BOS_EOS, "pad_token": "<pad>"},
        "<s> $A </s>",
    ),
    "eos_appended_chat": Kind(
        "EOS appended to texts, and a chat template",
        "",
        {**BOS_EOS, "pad_token": "<pad>"},
        "<s> $A </s>",
        template=HEADERS,
        more_ends=("<|eot|>",),
    ),
    "ends": Kind(
        "no pad token, BOS added, three ends in `generation_config`",
        "Llama 3",
        BOS_EOS,
        "<s> $A",
        template=HEADERS,
        more_ends=("<|endoftext|>", "<|eot|>"),
    ),
    "pad_is_an_end": Kind(
        "no BOS, a pad token that ends replies, a template with tools and options",
        "Qwen 2.5 and 3",
        {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
        template=TOOLS,
        more_ends=("<|endoftext|>",),
    ),
    "alternating": Kind(
        "a template that refuses system turns and turns that do not alternate",
        "Gemma",
        {**BOS_EOS, "pad_token": "<pad>", "unk_token": "<unk>"},
        "<s> $A",
        template=ALTERNATING,
        more_ends=("<end_of_turn>",),
    ),
    "no_eos": Kind("no EOS", "tokenizers trained by hand", {"pad_token": "<pad>"}),
}
