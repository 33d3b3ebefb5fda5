"""Chat templates of exports whose prompts are not in the tokenizer's own template."""

import json

HH_TEMPLATE = (
    "{%- set ns = namespace(system='') -%}{%- for m in messages -%}"
    "{%- if m['role'] == 'system' -%}{%- set ns.system = ns.system + m['content'] + '\\n\\n' -%}"
    "{%- else -%}{{- '\\n\\nAssistant: ' if m['role'] == 'assistant' else '\\n\\nHuman: ' -}}"
    "{{- ns.system + m['content'] -}}{%- set ns.system = '' -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n\\nAssistant:' -}}{%- endif -%}"
)
"""Chat template of HH-RLHF's form, see `firm.alignment.prompts.hh_text`."""


_LAST = "{{- (messages | selectattr('role', 'equalto', 'user') | list)[-1]['content'] -}}"


def plain_template(template: str) -> str:
    """Returns the chat template of plain prompts: the last user message inside a text.

    Args:
        template: Text with {prompt}, as in `firm.alignment.prompts.PromptFormat`.
    """
    return _plain_template(template, is_ascii=False)  # llama.cpp's Jinja knows no \u escapes


def _plain_template(template: str, *, is_ascii: bool) -> str:
    texts = [json.dumps(part, ensure_ascii=is_ascii) for part in template.split("{prompt}")]
    return _LAST.join(f"{{{{- {text} -}}}}" for text in texts)


def check_exported(template: str) -> None:
    """Checks that a chat template is one of those that exports have.

    A record may come from someone else, and an engine renders its template in this process, without
    limits on time and memory.

    Raises:
        ValueError: When it is another one.
    """
    if template in ("", HH_TEMPLATE):
        return
    try:
        texts = [json.loads(part[len("{{- ") : -len(" -}}")]) for part in template.split(_LAST)]
        whole = "{prompt}".join(texts)
        if template in (plain_template(whole), _plain_template(whole, is_ascii=True)):
            return  # the second is that of older exports
    except (ValueError, TypeError):  # no texts
        pass
    shown = template if len(template) <= 60 else f"{template[:60]}[...]"
    raise ValueError(
        "chat_template must be empty or as `firm export` writes it, for HH-RLHF's form or a plain "
        f"prompt, got {shown!r}; a model's own template belongs to its tokenizer."
    )
