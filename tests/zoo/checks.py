"""What holds for a model, a tokenizer and data: FIRM beside plain transformers.

A `Place` is a model of one architecture with one tokenizer, once in FIRM's hands and once in those
of plain transformers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from firm.alignment import (
    AlignmentClient,
    LoraSettings,
    MultiObjectiveTrainer,
    PolicyConfig,
    PPOConfig,
    Prompt,
    PromptsConfig,
    RolloutConfig,
    build_trainer,
    check_passes,
    copy_adapter,
    load_adapter_,
    load_base_model,
    load_policy,
    load_prompts,
    load_tokenizer,
    save_adapter,
)
from firm.alignment.estimator_config import CriticFreeConfig
from firm.alignment.policy import set_mode
from firm.alignment.stacked.trainer import stacked_trainers
from firm.federation import LocalEngine, RandomStream, ServerState
from firm.federation.engines.stacked import StackedEngine
from firm.federation.serialization import pack, unpack
from firm.federation.strategies.firm import firm_round
from firm.federation.strategy_configs import FirmConfig
from firm.gradients import PerSequenceGradients
from tests.zoo import oracle
from tests.zoo.architectures import ARCHITECTURES, swap_outputs_
from tests.zoo.data import DATA, Row
from tests.zoo.kinds import KINDS

MAX_PROMPT, MAX_NEW = 120, 6
"""Tokens. Positions run to 256, sliding windows are 16 wide."""
CLOSE = 1e-3
"""Nats. Float32 sums in another order move a log-probability by up to 4e-5 here (most models 3e-6);
one wrong position, mask or special token moves it by more than 1e-2."""
COLD = 1e-3
"""Temperature at which a lead of `LEAD` in the logits is e^20 to one."""
LEAD = 0.02


@dataclass
class Place:
    """A model of one architecture with one tokenizer."""

    plain: Any
    """The model, which FIRM never gets."""
    plain_tokenizer: Any
    ends: list[int]
    """Ids in the model's generation_config."""
    policy: Any
    tokenizer: Any

    def trainer(self, estimator: str = "critic_free", **rollout: Any) -> MultiObjectiveTrainer:
        """Returns a trainer with two rewards."""
        options = {"temperature": 1.0, "stop_strings": [], **rollout}
        return build_trainer(
            NETWORK if estimator == "network" else ESTIMATORS[estimator],
            rollout_config=RolloutConfig(
                max_new_tokens=MAX_NEW, max_prompt_tokens=MAX_PROMPT, **options
            ),
            policy=self.policy,
            tokenizer=self.tokenizer,
            reward_fns={"first": _first, "second": _second},
            num_rounds=4,
        )


_STEP: dict[str, Any] = {
    "batch_size": 4, "minibatch_size": 4, "num_epochs": 1, "actor_optimizer": "sgd",
    "actor_learning_rate": 0.5,
}  # fmt: skip
ESTIMATORS = {
    "critic_free": CriticFreeConfig(num_replies=2, **_STEP),
    "ppo": PPOConfig(**{**_STEP, "batch_size": 2, "minibatch_size": 2}),
}
"""Plain gradient steps: Adam would turn rounding of gradients near zero into whole steps."""
NETWORK = replace(ESTIMATORS["ppo"], critic="network")


def _first(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    return [_drawn(_said(each), 7) for each in completions]


def _second(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    return [_drawn(_said(each), 11) for each in completions]


def _drawn(text: str, factor: int) -> float:
    """Returns a number in [0, 1) that differs between texts.

    Replies with equal rewards would leave training nothing but the rounding of their KL.
    """
    return crc32(text.encode() * factor) % 997 / 997


def _said(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def place(
    name: str, kind: str, *, seed: int = 0, targets: Sequence[str] | None = None, end_at: int = 2
) -> Place:
    """Returns the place, whose first row ends after some tokens where its kind has an end.

    Raises:
        ValueError: FIRM refuses the model.
    """
    tokenizer = KINDS[kind].tokenizer()
    ends = KINDS[kind].ends(tokenizer)
    special = {
        key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    plain, given = (ARCHITECTURES[name].model(special, seed=seed) for _ in range(2))
    if ends:
        _end_early_(plain, given, tokenizer, ends[-1], end_at)
    given.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    config = PolicyConfig(
        name, lora=LoraSettings(r=4, alpha=8, dropout=0.0, target_modules=targets and list(targets))
    )
    own = load_tokenizer(config, tokenizer)
    policy = load_policy(config, stream=RandomStream(seed, "policy", "adapter"), given=given)
    if "everywhere" not in ARCHITECTURES[name].refused:
        check_passes(policy, name)
    return Place(plain, tokenizer, ends, policy, own)


def place_of(folder: str) -> Place:
    """Returns the place of a real model's folder, in float32."""
    config = PolicyConfig(folder, lora=LoraSettings(r=4, alpha=8, dropout=0.0))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = plain.generation_config.eos_token_id
    policy = load_policy(config, stream=RandomStream(0, "policy", "adapter"))
    return Place(
        plain,
        AutoTokenizer.from_pretrained(folder),
        list(ends) if isinstance(ends, list) else [ends],
        policy,
        load_tokenizer(config),
    )


def _end_early_(plain: Any, given: Any, tokenizer: Any, end: int, at: int) -> None:
    """Lets an end token say what another one would say, that the first row would come to.

    A random model would hardly ever end by itself.
    """
    prompt = oracle.prompt_ids(DATA["text"][0], tokenizer)
    said, _ = oracle.greedy(plain, prompt, [], MAX_NEW)
    used = {end, *prompt, *said[:at]}
    token = next((token for token in said[at:] if token not in used), None)
    if token is not None:
        for model in (plain, given):
            swap_outputs_(model, end, token)


@cache
def prompts_of(data: str, folder: Path) -> list[Prompt]:
    """Returns the prompts of a file of data, one for each row."""
    path = folder / f"{data}.jsonl"
    path.write_text("".join(json.dumps(row.fields) + "\n" for row in DATA[data]))
    return load_prompts(PromptsConfig([str(path)]))


@dataclass
class Case:
    """A row that is to be answered, with the prompt that FIRM reads and the right token ids."""

    data: str
    row: Row
    prompt: Prompt
    ids: list[int]


def cases(place: Place, folder: Path, data: Sequence[str] = tuple(DATA)) -> list[Case]:
    """Returns the rows that have an answer, after checks that FIRM refuses the others alone."""
    trainer, found = place.trainer(), []
    for name in data:
        prompts = prompts_of(name, folder)
        assert len(prompts) == len(DATA[name]), f"{name}: rows were merged or dropped"
        for row, prompt in zip(DATA[name], prompts, strict=True):
            try:
                ids = oracle.prompt_ids(row, place.plain_tokenizer)
            except oracle.Refused:
                refusal(lambda prompt=prompt: trainer.encode([prompt]))
            else:
                found.append(Case(name, row, prompt, ids))
    return found


def refusal(call: Any) -> str:
    """Returns the one line in which a call is refused."""
    try:
        call()
    except ValueError as error:
        line = str(error)
        assert line
        assert "\n" not in line, line
        return line
    raise AssertionError("nothing was refused")


# --- Prompts, log-probabilities, ends -------------------------------------------------------------


def check_prompts(place: Place, found: Sequence[Case]) -> None:
    """Checks that the policy reads what the model's own generation path reads."""
    queries = place.trainer().encode([case.prompt for case in found])
    width = queries.token_ids.size(1)
    for case, ids, length in zip(
        found, queries.token_ids.tolist(), queries.lengths.tolist(), strict=True
    ):
        own = ids[width - length :]
        if len(case.ids) <= MAX_PROMPT:
            assert own == case.ids, (case.data, place.tokenizer.decode(own))
            continue
        _check_cut(place, case, own)
    assert queries.is_cut == [len(case.ids) > MAX_PROMPT for case in found]


def _check_cut(place: Place, case: Case, ids: list[int]) -> None:
    """Checks that a prompt over the limit keeps its beginning tokens, system turn and end."""
    assert len(ids) <= MAX_PROMPT
    text, whole = place.tokenizer.decode(ids), place.tokenizer.decode(case.ids)
    ending = next(n for n in range(1, len(whole)) if whole[-n:] != text[-n:]) - 1
    assert ending >= len("\n\nAssistant:"), text
    if place.plain_tokenizer("a")["input_ids"][0] == place.plain_tokenizer.bos_token_id:
        assert ids[0] == case.ids[0]
    for turn in case.row.messages:
        if turn["role"] == "system":
            assert turn["content"] in text
    last = case.row.messages[-1]["content"]
    assert last[-20:] in text


def check_logprobs(place: Place, found: Sequence[Case]) -> None:
    """Checks a batch's log-probabilities against passes of single rows.

    Those of generation, of the reference and of a forward pass, and those of a policy in training,
    where dropout of the base model would show.
    """
    trainer = place.trainer()
    torch.manual_seed(1)
    per_prompt = trainer.config.replies_per_prompt
    sampled = trainer.sample(trainer.encode([case.prompt for case in found]))
    rollouts = trainer.with_logprobs(sampled, measures_mismatch=True)
    for at in range(rollouts.num_rows):
        prompt = _prompt_ids(rollouts, at)
        case = found[at // per_prompt]
        if len(case.ids) <= MAX_PROMPT:
            assert prompt == case.ids, case.data
        response = rollouts.responses[at].tolist()
        first_end = next((i for i, token in enumerate(response) if token in place.ends), None)
        length = MAX_NEW if first_end is None else first_end + 1
        said = response[:length]
        assert int(rollouts.num_tokens[at]) == length, (said, place.ends)
        assert bool(rollouts.ended[at]) == (first_end is not None)
        assert rollouts.completions[at] == place.plain_tokenizer.decode(
            said, skip_special_tokens=True
        )
        right = oracle.logprobs(place.plain, prompt, said)
        for kind, values in {
            "generation": rollouts.logprobs,
            "reference": rollouts.reference_logprobs,
            "forward": rollouts.logprobs - rollouts.mismatch,
        }.items():
            torch.testing.assert_close(
                values[at, :length].double(), right, atol=CLOSE, rtol=0,
                msg=lambda text, kind=kind, case=case: f"{kind}, {case.data}: {text}",
            )  # fmt: skip


def _prompt_ids(rollouts: Any, at: int) -> list[int]:
    length = int(rollouts.queries.lengths[at])
    ids = rollouts.queries.token_ids[at].tolist()
    return ids[len(ids) - length :]


def check_training_mode(place: Place, found: Sequence[Case]) -> None:
    """Checks that a policy in training says what it says in evaluation: dropout is off."""
    place.trainer()
    ids = torch.tensor([found[0].ids])
    set_mode(place.policy, is_training=True)
    torch.manual_seed(2)
    with torch.no_grad():
        got = place.policy(input_ids=ids, use_cache=False).logits
        right = place.plain(input_ids=ids, use_cache=False).logits
    set_mode(place.policy, is_training=False)
    torch.testing.assert_close(got, right, atol=CLOSE, rtol=CLOSE)


def check_generation(place: Place, found: Sequence[Case]) -> None:
    """Checks replies at a temperature near 0 against `generate`.

    From where the model all but hesitates between two tokens, a row is not compared.
    """
    trainer = place.trainer(temperature=COLD)
    rollouts = trainer.sample(trainer.encode([case.prompt for case in found]))
    per_prompt = trainer.config.replies_per_prompt
    for at, case in enumerate(found):
        right, leads = oracle.greedy(
            place.plain, _prompt_ids(rollouts, at * per_prompt), place.ends, MAX_NEW
        )
        clear = next((i for i, lead in enumerate(leads) if lead < LEAD), len(right))
        length = int(rollouts.num_tokens[at * per_prompt])
        said = rollouts.responses[at * per_prompt, :length].tolist()
        if clear == len(right):
            assert said == right, case.data
            assert bool(rollouts.ended[at * per_prompt]) == (right[-1] in place.ends)
        else:
            assert said[:clear] == right[:clear], case.data


# --- Rewards --------------------------------------------------------------------------------------


def check_rewards(place: Place, found: Sequence[Case]) -> None:
    """Checks that reward functions get rows as the data have them, with their columns."""
    seen: dict[str, list[Any]] = {}

    def look(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        for name, values in {"prompts": prompts, "answer": answer}.items():
            seen.setdefault(name, []).extend(values)
        return [0.0] * len(completions)

    trainer = place.trainer()
    trainer.reward_fns = {"first": look, "second": _second}
    chosen = [case for case in found if case.data == "columns"]
    trainer.score(trainer.sample(trainer.encode([case.prompt for case in chosen])))
    per_prompt = trainer.config.replies_per_prompt
    expected = [case for case in chosen for _ in range(per_prompt)]
    assert seen["prompts"] == [case.row.fields["prompt"] for case in expected]
    assert seen["answer"] == [case.row.fields["answer"] for case in expected]


# --- Training -------------------------------------------------------------------------------------

CLIENTS = ("client_0", "client_1")


def _federation(
    place: Place, found: Sequence[Case], *, engine: str = "local", estimator: str = "critic_free"
) -> tuple[ServerState, Any]:
    trainer = place.trainer(estimator)
    new_trainer = stacked_trainers(trainer) if engine == "stacked" else lambda: trainer
    prompts = [case.prompt for case in found]
    clients = [
        AlignmentClient(name, prompts[at::2], new_trainer(), seed=3)
        for at, name in enumerate(CLIENTS)
    ]
    start = copy_adapter(trainer.adapter_parameters)
    state = ServerState(start, objectives=trainer.objectives, seed=3)
    if engine == "stacked":
        return state, StackedEngine(clients, max_rows=1000)
    return state, LocalEngine(clients)


def check_adapter(place: Place, found: Sequence[Case], folder: Path) -> None:
    """Checks that a trained adapter is the same model in plain PEFT, and merged."""
    state, engine = _federation(place, found)
    state, _ = firm_round(state, CLIENTS, engine, FirmConfig())
    trainer = place.trainer()
    load_adapter_(trainer.adapter_parameters, state.adapter)
    save_adapter(place.policy, folder)
    rows = [case.ids for case in found[:3]]
    own, merged = oracle.logits_with_adapter(place.plain, folder, rows)
    with torch.no_grad():
        for ids, by_peft, after_merging in zip(rows, own, merged, strict=True):
            ids = torch.tensor([ids])
            mine = place.policy(input_ids=ids, use_cache=False).logits[0]
            base = place.plain(input_ids=ids, use_cache=False).logits[0]
            assert (mine - base).abs().max() > CLOSE * 2, "training changed nothing"
            torch.testing.assert_close(by_peft, mine, atol=CLOSE, rtol=CLOSE)
            torch.testing.assert_close(after_merging, mine, atol=CLOSE, rtol=CLOSE)


def check_resumed(name: str, kind: str, folder: Path) -> None:
    """Checks that two rounds are the same bit for bit with a checkpoint between them."""

    def fresh() -> tuple[ServerState, Any]:
        here = place(name, kind)
        return _federation(here, cases(here, folder, ["text", "messages", "columns"]))

    state, engine = fresh()
    half, _ = firm_round(state, CLIENTS, engine, FirmConfig())
    saved = pack([half.to_state(), engine.client_states(half.accepted)])
    whole, _ = firm_round(half, CLIENTS, engine, FirmConfig())
    server, clients = unpack(saved)
    _, engine = fresh()
    engine.restore_client_states(clients)
    resumed, _ = firm_round(ServerState.from_state(server), CLIENTS, engine, FirmConfig())
    for key, values in whole.adapter.items():
        assert torch.equal(values, resumed.adapter[key]), key


def check_gradients(place: Place, found: Sequence[Case]) -> None:
    """Checks the gradients of two sums of replies, by one backward pass, against autograd."""
    place.trainer()  # switches dropout off
    model = place.policy
    set_mode(model, is_training=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(4)
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids = torch.tensor([(case.ids * 9)[:24] for case in found[:3]])
    coefficients = torch.tensor([[1.0, 2.0, 3.0], [1.0, -1.0, 0.5]])  # [M, B]

    def losses() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:], reduction="none"
        ).sum(1)

    with PerSequenceGradients(model, parameters) as sequences:
        jacobian = sequences.jacobian(losses(), coefficients)
    right = [torch.autograd.grad(row @ losses(), parameters) for row in coefficients]
    expected = torch.stack([torch.cat([g.flatten() for g in row]) for row in right])
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    set_mode(model, is_training=False)
    error = (jacobian - expected).norm() / expected.norm()
    assert error < 1e-4, error.item()


def check_stacked(name: str, kind: str, folder: Path, estimator: str) -> None:
    """Checks that clients in joint passes end as clients one after the other."""
    ends = {}
    for engine in ("local", "stacked"):
        here = place(name, kind)
        found = cases(here, folder, ["text", "messages", "columns"])
        state, runs = _federation(here, found, engine=engine, estimator=estimator)
        after, row = firm_round(state, CLIENTS, runs, FirmConfig())
        step = {key: after.adapter[key] - value for key, value in state.adapter.items()}
        ends[engine] = step, [own["scores"] for own in row["clients"]]
    (mine, scores), (theirs, other_scores) = ends.values()
    assert scores == other_scores  # the same tokens
    size = torch.cat([values.flatten() for values in mine.values()]).norm()
    error = torch.cat([(mine[key] - theirs[key]).flatten() for key in mine]).norm()
    assert size > 0
    assert error < 1e-3 * size, (error / size).item()


def check_network(name: str, kind: str, folder: Path) -> None:
    """Checks that a value network trains, or is refused where transformers has no classifier."""
    here = place(name, kind)
    config = ARCHITECTURES[name].config({"pad_token_id": 0}).get_text_config()
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        assert "estimator.critic must be heads" in refusal(lambda: here.trainer("network"))
        return
    found = cases(here, folder, ["text", "messages", "columns"])
    state, runs = _federation(here, found, engine="local", estimator="network")
    _, row = firm_round(state, CLIENTS, runs, FirmConfig())
    assert not row.get("failures")
    for metrics in row["clients"]:
        assert all(map(math.isfinite, metrics["value_loss"].values()))


def check_head(name: str, kind: str, folder: Path, tmp: Path) -> None:
    """Checks that an adapter on the head merges to the same model, or is refused where it is tied.

    A merge would change the embedding, too.
    """
    plain = ARCHITECTURES[name].model({"pad_token_id": 0})
    head = plain.get_output_embeddings()
    target = next(full for full, module in plain.named_modules() if module is head)
    if head.weight is plain.get_input_embeddings().weight:
        line = refusal(lambda: place(name, kind, targets=[target.rpartition(".")[2]]))
        assert "policy.lora.target_modules" in line
        return
    here = place(name, kind, targets=[target.rpartition(".")[2]])
    check_adapter(here, cases(here, folder, ["text", "messages"]), tmp)


# --- Refusals -------------------------------------------------------------------------------------


def refused(name: str, where: str, folder: Path) -> str:
    """Returns the line in which FIRM refuses an architecture: see `Architecture.refused`."""
    if where == "everywhere":
        return refusal(lambda: check_passes(place(name, "own_pad").policy, name))
    return refusal(lambda: stacked_trainers(place(name, "own_pad").trainer()))


SMALL = {"vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
TEXT = {**SMALL, "num_hidden_layers": 1}
NO_LANGUAGE_MODELS = {
    "T5": "no language model could be loaded",
    "BART": "is not a complete language model",
    "LLaVA": "no language model could be loaded",
}
"""Models that transformers does not load as language models, and what FIRM says of them."""


def refused_folder(model: str, folder: Path) -> str:
    """Returns the line in which FIRM refuses the folder of another kind of model."""
    made = {
        "T5": lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=288, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        "BART": lambda: BartForConditionalGeneration(
            BartConfig(
                vocab_size=288, d_model=32, encoder_layers=1, decoder_layers=1,
                encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                decoder_ffn_dim=48,
            )
        ),
        "LLaVA": lambda: LlavaForConditionalGeneration(
            LlavaConfig(
                text_config={**TEXT, "model_type": "llama"},
                vision_config={
                    **TEXT, "image_size": 28, "patch_size": 14, "model_type": "clip_vision_model",
                },
            )
        ),
    }[model]()  # fmt: skip
    made.save_pretrained(folder)
    return refusal(lambda: load_base_model(PolicyConfig(str(folder))))
