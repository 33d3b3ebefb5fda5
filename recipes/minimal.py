"""FIRM in one file, from top to bottom: load, sample, score, M gradients, weights, step, average.

    python recipes/minimal.py                                   # the miniature world, a minute
    python recipes/minimal.py --policy MODEL --prompts FILE.jsonl --device cuda

Algorithm 1 of "FIRM: Federated In-client Regularized Multi-objective Alignment" (Nourzad et al.)
with a critic-free estimator: group-relative advantages (GRPO, arXiv:2402.03300) and CISPO's loss
(arXiv:2506.13585). It needs torch, transformers, peft and `firm.solvers`; `firm align` gives the
same adapter with the same settings and seed, and everything that a run needs besides.
"""

import argparse
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from firm.solvers import firm_weights

MINIATURE = Path(__file__).parent.parent / "firm/miniature/checkpoints"
HUMAN = "\n\nHuman:"
Adapter = dict[str, torch.Tensor]
Reward = Callable[..., list[float]]
"""Called with the replies as `completions`; returns a score for each."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the names in parentheses are those of the paper."""

    rounds: int = 12
    num_clients: int = 2  # (C)
    num_local_steps: int = 2  # (K)
    beta: float = 0.01  # regularisation towards equal weights (β of Eq. 9)
    batch_size: int = 16  # replies of a local step (B)
    minibatch_size: int = 8  # replies of an optimizer step
    num_replies: int = 4  # to a prompt
    learning_rate: float = 1e-3
    kl_coefficient: float = 0.2
    ratio_cap: float = 2.0
    rank: int = 4
    max_prompt_tokens: int = 64
    max_new_tokens: int = 16
    seed: int = 0
    device: str = "cpu"


def brief(completions: Sequence[str], **_: Any) -> list[float]:
    """Scores how short each reply is: 1 for an empty one, 1/2 at ten words."""
    return [10 / (10 + len(text.split())) for text in completions]


def varied(completions: Sequence[str], **_: Any) -> list[float]:
    """Scores how many different words each reply has, in tens."""
    return [len({*text.lower().split()}) / 10 for text in completions]


class Client:
    """A client's prompts, random streams and optimizer, which never leave it."""

    def __init__(self, name: str, prompts: Any, parameters: Any, settings: Settings) -> None:
        self.prompts, self._order = prompts, list[int]()
        seeds = {use: seed_of(settings.seed, name, use) for use in ("prompts", "rollout", "update")}
        self._shuffles = torch.Generator().manual_seed(seeds["prompts"])
        self.sampling = torch.Generator(settings.device).manual_seed(seeds["rollout"])
        high, low = divmod(seeds["update"], 2**32)
        self.minibatches = np.random.RandomState([high, low])
        self.optimizer = torch.optim.AdamW(
            parameters, lr=settings.learning_rate, weight_decay=0.0, fused=True
        )

    def draw(self, count: int) -> list[str]:
        """Returns the next prompts of endless shuffled passes."""
        while len(self._order) < count:
            self._order += torch.randperm(len(self.prompts), generator=self._shuffles).tolist()
        picked, self._order = self._order[:count], self._order[count:]
        return [self.prompts[index] for index in picked]


def seed_of(seed: int, *names: str) -> int:
    """Returns the seed of a random stream, in [0, 2^63)."""
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# --- Sampling -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replies:
    """B replies of up to T tokens to left-padded prompts of Q tokens."""

    ids: torch.Tensor
    """Prompts and replies, [B, Q + T]."""
    is_context: torch.Tensor
    """Mask of the tokens that are not padding, bool [B, Q + T]."""
    is_reply: torch.Tensor
    """Mask of the replies' tokens, bool [B, T]."""
    logprobs: torch.Tensor
    """Log-probabilities of the replies' tokens when they were sampled, [B, T]."""

    def rows(self, index: torch.Tensor) -> "Replies":
        """Returns some of the replies."""
        return Replies(*(values[index] for values in vars(self).values()))


@torch.no_grad()
def sample(
    policy: Any, tokenizer: Any, prompts: Sequence[str], client: Client, settings: Settings
) -> tuple[Replies, list[str]]:
    """Samples a reply to each prompt up to its end or another human turn; returns texts, too."""
    is_chat = not prompts[0].startswith(HUMAN)
    texts: Any = prompts
    if is_chat:
        turns = [[{"role": "user", "content": text}] for text in prompts]
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    rows = tokenizer(texts, add_special_tokens=not is_chat)["input_ids"]
    rows = [row[-settings.max_prompt_tokens :] for row in rows]
    width = max(map(len, rows))
    prompt_ids = torch.tensor([[0] * (width - len(row)) + row for row in rows]).to(policy.device)
    is_context = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    is_context = is_context.bool().to(policy.device)

    tokens, logprobs = list[torch.Tensor](), list[torch.Tensor]()
    positions, new, cache = is_context.cumsum(1) - is_context.long(), prompt_ids, None
    is_open = torch.ones(len(rows), dtype=torch.bool, device=policy.device)
    ends = policy.generation_config.eos_token_id
    ends = torch.tensor([tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])])
    while len(tokens) < settings.max_new_tokens and is_open.any():
        output = policy(
            input_ids=new, attention_mask=is_context, position_ids=positions, past_key_values=cache
        )
        scores = output.logits[:, -1].float().log_softmax(-1)
        # a token with the largest ratio of its probability to an exponential variate is a sample
        draws = torch.empty_like(scores).exponential_(generator=client.sampling)
        token = (scores.exp() / draws).argmax(-1)
        tokens.append(token.where(is_open, -1))
        logprobs.append(scores.gather(1, token[:, None])[:, 0])
        is_open = is_open & ~torch.isin(token, ends.to(token))
        new, cache, positions = token[:, None], output.past_key_values, positions[:, -1:] + 1
        is_context = torch.cat([is_context, torch.ones_like(is_context[:, :1])], dim=1)

    replies = torch.stack(tokens, dim=1)  # [B, T], -1 after the end
    texts, lengths = zip(*(ended(row, tokenizer) for row in replies.tolist()), strict=True)
    lengths = torch.tensor(lengths, device=policy.device)
    is_reply = torch.arange(replies.size(1), device=policy.device) < lengths[:, None]
    is_context = torch.cat([is_context[:, :width], is_reply], dim=1)
    ids = torch.cat([prompt_ids, replies.clamp(min=0)], dim=1)
    return Replies(ids, is_context, is_reply, torch.stack(logprobs, dim=1)), list(texts)


def ended(row: Sequence[int], tokenizer: Any) -> tuple[str, int]:
    """Returns the text of a sampled row up to another human turn, and its number of tokens."""
    row = [token for token in row if token >= 0]
    for length in range(1, len(row) + 1):
        text = tokenizer.decode(row[:length], skip_special_tokens=True)
        if HUMAN in text:
            return text[: text.index(HUMAN)], length
    return tokenizer.decode(row, skip_special_tokens=True), len(row)


def logprobs_of(policy: Any, replies: Replies) -> torch.Tensor:
    """Returns the log-probabilities of the replies' tokens from one pass, [B, T]."""
    mask, width = replies.is_context, replies.ids.size(1) - replies.is_reply.size(1)
    positions = mask.cumsum(1) - mask.long()
    output = policy(input_ids=replies.ids, attention_mask=mask, position_ids=positions)
    scores = output.logits[:, width - 1 : -1].float().log_softmax(-1)
    return scores.gather(2, replies.ids[:, width:, None])[..., 0]


# --- The losses and their gradients ---------------------------------------------------------------


def advantages_of(rewards: torch.Tensor, penalty: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the advantages of replies over others to their prompt, [M, B].

    Args:
        rewards: Rewards of the replies, those to a prompt adjacent, [M, B].
        penalty: KL penalty of each reply, [B], which is subtracted from every reward.
        size: Number of replies to a prompt.
    """
    groups = (rewards - penalty).double().unflatten(1, (-1, size))
    centred = (groups - groups.mean(2, keepdim=True)).flatten(1)
    deviations = (centred.square().sum(1, keepdim=True) / (rewards.size(1) - 1)).sqrt()
    return (centred / (deviations + 1e-4)).to(rewards.dtype)


def losses_of(policy: Any, part: Replies, advantages: torch.Tensor, cap: float) -> torch.Tensor:
    """Returns the M losses of b replies, means over their tokens."""
    logprobs = logprobs_of(policy, part)
    ratios = torch.exp(logprobs - part.logprobs).detach().clamp(max=cap)
    by_reply = -(ratios * logprobs * part.is_reply).sum(1)  # [b]
    return advantages @ by_reply / part.is_reply.sum()


def local_step(
    policy: Any,
    tokenizer: Any,
    client: Client,
    rewards: Mapping[str, Reward],
    settings: Settings,
) -> tuple[list[float], list[float], float]:
    """Takes the optimizer steps of a batch; returns mean scores, mean weights and the KL."""
    parameters = [each for each in policy.parameters() if each.requires_grad]
    prompts = client.draw(settings.batch_size // settings.num_replies)
    prompts = [text for text in prompts for _ in range(settings.num_replies)]
    replies, texts = sample(policy, tokenizer, prompts, client, settings)
    scores = torch.tensor([score(completions=texts) for score in rewards.values()])  # [M, B]
    with torch.no_grad(), policy.disable_adapter():
        reference = logprobs_of(policy, replies)
    kl = ((replies.logprobs - reference) * replies.is_reply).sum(1)  # [B]
    penalty = settings.kl_coefficient * kl
    advantages = advantages_of(scores.to(kl), penalty, settings.num_replies)

    solved = []
    order = client.minibatches.permutation(settings.batch_size)
    for start in range(0, settings.batch_size, settings.minibatch_size):
        rows = torch.from_numpy(np.sort(order[start : start + settings.minibatch_size]))
        part, own = replies.rows(rows), advantages[:, rows]
        losses = losses_of(policy, part, own, settings.ratio_cap)
        gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in gradients])
        # λ = argmin over the simplex of λᵀ(Ĝ + β/2 I)λ (Eq. 9)
        gram = jacobian.double() @ jacobian.double().T
        weights = firm_weights(gram.cpu(), beta=settings.beta)
        direction = weights.to(jacobian) @ jacobian
        sizes = [each.numel() for each in parameters]
        for parameter, part in zip(parameters, direction.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        client.optimizer.step()
        solved.append(weights)
    return scores.mean(1).tolist(), torch.stack(solved).mean(0).tolist(), kl.mean().item()


def align(
    path: str, prompts: Sequence[str], rewards: Mapping[str, Reward], settings: Settings
) -> Adapter:
    """Aligns a policy, printing a line per round; returns its adapter by parameter name."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(seed_of(settings.seed, "adapter"))
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(r=settings.rank, lora_alpha=32, target_modules=names)
    policy = get_peft_model(base.to(settings.device), lora).eval()
    adapter = {name: each for name, each in policy.named_parameters() if each.requires_grad}

    generator = np.random.default_rng(seed_of(settings.seed, "partition"))
    shards = np.array_split(generator.permutation(len(prompts)), settings.num_clients)
    clients = [
        Client(f"client_{c}", [prompts[i] for i in sorted(shard)], [*adapter.values()], settings)
        for c, shard in enumerate(shards)
    ]
    state = {name: each.detach().clone() for name, each in adapter.items()}  # θ_t
    for number in range(1, settings.rounds + 1):
        updates, told = list[Adapter](), []
        for client in clients:
            with torch.no_grad():
                for name, parameter in adapter.items():
                    parameter.copy_(state[name])
            steps = range(settings.num_local_steps)
            told += [local_step(policy, tokenizer, client, rewards, settings) for _ in steps]
            updates.append({name: each.detach().clone() for name, each in adapter.items()})
        # the server's part: the mean of the clients' adapters, all that it ever sees
        state = {name: torch.stack([own[name] for own in updates]).mean(0) for name in state}
        scores, weights, kls = (np.mean(column, axis=0) for column in zip(*told, strict=True))
        shown = "  ".join(
            f"{name} {score:.3f} (weight {weight:.2f})"
            for name, score, weight in zip(rewards, scores, weights, strict=True)
        )
        print(f"round {number}/{settings.rounds}  {shown}  KL {kls:.2f}", flush=True)
    return state


def main() -> None:
    """Runs the command line."""
    warnings.simplefilter("ignore", FutureWarning)  # of PEFT's calls into transformers
    transformers.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default=str(MINIATURE / "policy"))
    parser.add_argument("--prompts", default=str(MINIATURE / "prompts_train.jsonl"))
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = vars(parser.parse_args())
    path, file = given.pop("policy"), Path(given.pop("prompts"))
    prompts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    align(path, prompts, {"brief": brief, "varied": varied}, Settings(**given))


if __name__ == "__main__":
    main()
