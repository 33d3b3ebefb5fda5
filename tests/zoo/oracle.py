"""Plain transformers and PEFT, one row at a time without padding. Nothing here is FIRM's."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.zoo.data import Row


class Refused(Exception):
    """There is no right answer: the template, or the form of HH-RLHF, has no place for the row."""


def prompt_ids(row: Row, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Returns the token ids that a prompt has in the model's own generation path."""
    if tokenizer.chat_template:
        try:
            return tokenizer.apply_chat_template(
                row.messages,
                tools=row.fields.get("tools"),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **row.fields.get("chat_template_kwargs", {}),
            )
        except TemplateError as error:
            raise Refused(str(error)) from error
    ids = tokenizer(tagged(row))["input_ids"]
    last = tokenizer.eos_token_id
    appends_end = last is not None and tokenizer("a")["input_ids"][-1] == last
    return ids[:-1] if appends_end else ids


def tagged(row: Row) -> str:
    """Returns a row in the form of HH-RLHF, by hand."""
    if row.is_hh:
        return row.fields["prompt"]
    system, text = "", ""
    for turn in row.messages:
        if turn["role"] == "system":
            system = turn["content"] + "\n\n"
        elif turn["role"] == "user":
            text += f"\n\nHuman: {system}{turn['content']}"
            system = ""
        elif turn["role"] == "assistant":
            text += f"\n\nAssistant: {turn['content']}"
        else:
            raise Refused(turn["role"])
    return text + "\n\nAssistant:"


@torch.no_grad()
def logprobs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Returns the log-probabilities of a response's tokens in one pass over one row, [T]."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    of_next = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)  # [T, V]
    return of_next[range(len(response)), list(response)]


@torch.no_grad()
def greedy(
    model: Any, prompt: Sequence[int], ends: Sequence[int], count: int
) -> tuple[list[int], list[float]]:
    """Returns what `generate` answers with these ends, and by how much each token leads."""
    model.generation_config = GenerationConfig(eos_token_id=list(ends) or None, pad_token_id=0)
    output = model.generate(
        input_ids=torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values for logits in output.logits]
    return output.sequences[0, len(prompt) :].tolist(), [(a - b).item() for a, b in best]


@torch.no_grad()
def logits_with_adapter(
    base: Any, folder: Path, rows: Sequence[Sequence[int]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns each row's logits [L, V] under a saved adapter, by PEFT and merged."""
    policy = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    own = [policy(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    merged = policy.merge_and_unload().eval()
    return own, [merged(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
