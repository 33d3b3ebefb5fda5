"""Sampling by a step that is compiled once for a bucket of rows and lengths, and then replayed.

A token of a small batch takes a GPU less time than Python needs to start its operations. Here one
call is a whole token: the model's pass, the choice of the tokens, and all that is to be remembered.
Rows, lengths, masks, preferences and adapters are buffers that are overwritten in place, so that a
step fits every client, round and preference. Python looks at the replies once in `BLOCK` tokens,
and then drops rows that have ended if a smaller bucket holds the others.
"""

import logging
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer

from firm.alignment.adapters.folded import FoldedAdapters, folds
from firm.alignment.adapters.forward import OwnRows, forward_of
from firm.alignment.decoding import (
    Prefilled,
    SamplingPart,
    draw_numbers,
    results_of,
    sampled_tokens,
)
from firm.alignment.head import LARGE_VOCABULARY
from firm.alignment.rollout_config import RolloutConfig
from firm.alignment.sequences import (
    INVALID_LOGPROB,
    TEMPERATURE_GUARD,
    continued_pass,
    has_plain_cache,
    takes_attention_masks,
)
from firm.base.sanitize import first_line
from firm.base.user_code import interruption_in

logger = logging.getLogger(__name__)

BLOCK = 16
"""Tokens after which Python looks at the replies."""
NUM_ENDS = 16
"""End tokens that a step compares with; fewer are padded."""

Adapters = Sequence[Mapping[str, torch.Tensor] | None]


class BufferLayer(StaticLayer):
    """Keys and values of a layer in given buffers, [R, H, L, D], written at a given column."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, column: torch.Tensor) -> None:
        super().__init__(max_cache_len=keys.size(2))
        self.keys, self.values, self.column = keys, values, column
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a token's keys and values at the column; returns all."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values


class StepRows(OwnRows):
    """Rows of a step, [C b], adjacent by adapter, with preferences in a buffer."""

    def __init__(self, preferences: torch.Tensor | None, *, is_base: bool) -> None:
        super().__init__(preferences)
        self.is_overwritten, self._is_base = True, is_base

    def is_base(self, layer: Any) -> bool:
        """Returns whether the rows use the base model."""
        return self._is_base

    def dropped(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns x; there is no dropout."""
        return x


@dataclass(frozen=True)
class Key:
    """All that a step is compiled for."""

    num_parts: int
    rows: int
    """Rows of each part."""
    length: int
    """Tokens of prompt and reply."""
    vocabulary: int
    """Random numbers of a row: the vocabulary, or 1."""
    num_shares: int
    """Objectives of the preferences; 0 without."""
    is_base: bool
    adapters: tuple[str, ...]
    """Names of the model's active adapters, whose weights a step reads."""


class Step:
    """Buffers and the compiled step of a bucket.

    Args:
        key: The bucket.
        run: Returns the logits [R, 1, V] from token ids [R, 1], attention's mask, positions and the
            cache; in the state of the policy for these rows.
        layers: Buffers of each layer's keys and values.
        device: Device of the rows.
    """

    def __init__(
        self,
        key: Key,
        run: Callable[..., torch.Tensor],
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rows: StepRows,
        device: torch.device,
    ) -> None:
        self.key, self.rows = key, rows
        self._run = run
        num_rows = key.num_parts * key.rows

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.tokens = zeros(num_rows, dtype=torch.long)
        self.positions = zeros(num_rows, 1, dtype=torch.long)
        self.mask = zeros(num_rows, key.length, dtype=torch.bool)
        self.is_open = zeros(num_rows, dtype=torch.bool)
        self.column = zeros(1, dtype=torch.long)
        self.index = zeros(1, dtype=torch.long)
        """Index of the token in its block."""
        self.sampled = zeros(num_rows, BLOCK, dtype=torch.long)
        self.logprobs = zeros(num_rows, BLOCK, dtype=torch.float32)
        self.temperature = torch.ones((), device=device)
        self.ends = zeros(NUM_ENDS, dtype=torch.long)
        is_single = key.vocabulary == 1  # one number per row
        size = (num_rows,) if is_single else (num_rows, key.vocabulary)
        own = torch.float64 if is_single and device.type != "mps" else torch.float32
        self.numbers = torch.ones(size, dtype=own, device=device)
        self.layers: list[Any] = [BufferLayer(*pair, self.column) for pair in layers]
        self.cache = Cache(self.layers)
        self.replay: Callable[[], Any] = self.step

    def step(self) -> None:
        """Passes the latest tokens, and samples the next ones."""
        self.positions.add_(1)
        self.mask.index_fill_(1, self.column, True)
        logits = self._run(
            self.tokens[:, None], self.mask[:, None, None], self.positions, self.cache
        )
        self.sample(logits[:, -1])
        self.column.add_(1)

    def sample(self, logits: torch.Tensor) -> None:
        """Samples tokens from logits [R, V], and writes them to the block."""
        scores = logits.to(self.temperature.device, torch.float32) / self.temperature
        tokens, logprobs = sampled_tokens(scores, self.numbers)
        self.sampled.index_copy_(1, self.index, tokens.where(self.is_open, -1)[:, None])
        self.logprobs.index_copy_(1, self.index, logprobs[:, None])
        self.is_open.logical_and_((tokens[:, None] != self.ends).all(1))
        self.tokens.copy_(tokens)
        self.index.add_(1)


class CompiledDecoder:
    """Compiled steps of a model, by bucket.

    Args:
        model: A model that `refusal` does not refuse, with or without an adapter.
        backend: Backend of `torch.compile`; None leaves the step to Python.
    """

    def __init__(self, model: Any, *, backend: Any = "inductor") -> None:
        self._model, self._backend = model, backend
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._steps: dict[Key, Step] = {}
        self._folded: dict[int, FoldedAdapters] = {}
        self._storage: list[torch.Tensor] = []  # of keys and values, by layer
        self.failure: str | None = None
        """Why steps cannot be compiled, once that was tried."""

    @torch.no_grad()
    def sample(
        self,
        first: Prefilled,
        parts: Sequence[SamplingPart],
        *,
        mask: torch.Tensor,
        preferences: torch.Tensor | None,
        adapters: Adapters,
        is_base: bool,
        on_token: Callable[[int], None] = lambda _: None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Samples the replies of all parts; returns them as `SamplingState.results` does.

        Args:
            first: Result of the pass over the prompts.
            parts: The prompts of N rows, whose settings are the same.
            mask: Mask of the prompts' tokens, bool [N, Q].
            preferences: Preferences by row, [N, M].
            adapters: Parameters of each part's adapter; None for the one in the slot.
            is_base: Whether the rows use the base model.
            on_token: Called with the number of tokens so far.

        Returns:
            Token ids and log-probabilities of each part; None, with no random number drawn, if the
            step could not be compiled.
        """
        vocabulary = first.logits.size(-1)
        key = Key(
            len(parts),
            bucket_of_rows(max(len(part.token_ids) for part in parts)),
            bucket_of_lengths(mask.size(1) + parts[0].max_new_tokens),
            1 if vocabulary >= LARGE_VOCABULARY else vocabulary,
            0 if preferences is None or is_base else preferences.size(1),
            is_base,
            () if is_base or self._base is self._model else tuple(self._model.active_adapters),
        )
        if self.failure is not None:
            return None
        arguments = key, first, parts, mask, preferences, on_token
        if is_base or self._base is self._model:
            return self._sample(*arguments)
        forward, count = forward_of(self._model), len(adapters)
        if not folds(self._model, forward.kind):
            if any(adapter is not None for adapter in adapters):  # layers compute the slot's
                self._fail("its layers' weights cannot be combined with each client's adapter")
                return None
            return self._sample(*arguments)
        if count in self._folded:
            self._folded[count].write_(adapters)
        else:
            self._folded[count] = FoldedAdapters(self._model, forward.kind, adapters)
        with forward.using(self._model, self._folded[count]):
            return self._sample(*arguments)

    def _sample(
        self,
        key: Key,
        first: Prefilled,
        parts: Sequence[SamplingPart],
        mask: torch.Tensor,
        preferences: torch.Tensor | None,
        on_token: Callable[[int], None],
    ) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        counts = [len(part.token_ids) for part in parts]
        settings, num_rows, rows = parts[0], sum(counts), key.rows
        width, most, vocabulary = mask.size(1), settings.max_new_tokens, first.logits.size(-1)
        step = self._step(key, first.cache)
        if step is None:
            return None
        device = mask.device
        # place -> row; places beyond a part's rows repeat its first row, and are closed
        order = [
            end - count + (at if at < count else 0)
            for end, count in zip(accumulate(counts), counts, strict=True)
            for at in range(rows)
        ]
        is_open = [at < count for count in counts for at in range(rows)]
        places = torch.tensor(order, device=device)
        source = places if first.index is None else first.index[places]
        for own, layer in zip(step.layers, first.cache.layers, strict=True):
            own.keys[:, :, :width] = layer.keys[source]
            own.values[:, :, :width] = layer.values[source]
            own.keys[:, :, width:].zero_()  # a masked NaN of an earlier rollout is still one
            own.values[:, :, width:].zero_()
        first.cache.reset()  # its memory is not needed any more
        step.mask.zero_()
        step.mask[:, :width] = mask[places]
        step.positions.copy_(first.positions[source])
        step.column.fill_(width)
        step.temperature.fill_(settings.temperature + TEMPERATURE_GUARD)
        step.ends.fill_(-1)
        if settings.end_ids:
            step.ends[: len(settings.end_ids)] = torch.tensor(list(settings.end_ids))
        if step.rows.preferences is not None and preferences is not None:
            step.rows.preferences.copy_(preferences[places])
        step.is_open.copy_(torch.tensor(is_open))
        logits = first.logits[source]
        tokens = torch.full((num_rows, most), -1, dtype=torch.long, device=device)
        logprobs = torch.full((num_rows, most), INVALID_LOGPROB, device=device)
        lengths: list[int | None] = [None] * len(parts)
        done = 0
        while True:
            count = min(BLOCK, most - done)
            states = [
                part.draws.save() if length is None else None
                for part, length in zip(parts, lengths, strict=True)
            ]
            step.index.zero_()
            for at in range(count):
                on_token(done + at)
                is_done = [length is not None for length in lengths]
                numbers = draw_numbers(parts, is_done, vocabulary)
                torch.index_select(numbers, 0, places, out=step.numbers)
                if done + at == 0:
                    step.sample(logits)
                else:
                    self._replay(step)
            block = step.sampled[:, :count]
            found = block.tolist()  # the only value that Python waits for
            real = [place for place, own in enumerate(found) if own[0] >= 0]
            at_place = torch.tensor(real, dtype=torch.long, device=device)
            at_row = places[at_place]
            tokens[at_row, done : done + count] = block[at_place]
            logprobs[at_row, done : done + count] = step.logprobs[:, :count][at_place]
            done += count
            ends = set(settings.end_ids)
            is_open = [own[-1] >= 0 and own[-1] not in ends for own in found]
            spans = [slice(at * rows, (at + 1) * rows) for at in range(len(parts))]
            for at, (part, span) in enumerate(zip(parts, spans, strict=True)):
                if lengths[at] is None and (done == most or not any(is_open[span])):
                    taken = max(sum(token >= 0 for token in row) for row in found[span])
                    lengths[at] = done - count + taken
                    if taken < count:  # as many numbers as one token after the other
                        part.draws.restore(states[at])
                        for _ in range(taken):
                            part.draws.draw(vocabulary)
            num_open = max(sum(is_open[span]) for span in spans)
            if done == most or not num_open:
                break
            if bucket_of_rows(num_open) < rows and self.failure is None:
                step, places, is_open = self._shrink(step, places, is_open)
                rows = step.key.rows
        return results_of(parts, tokens, logprobs, lengths)

    def _shrink(
        self, step: Step, places: torch.Tensor, is_open: list[bool]
    ) -> tuple[Step, torch.Tensor, list[bool]]:
        """Moves the open rows to a smaller bucket; returns it, its rows and the open ones."""
        size = step.key.rows
        open_rows = [
            [at for at in range(start, start + size) if is_open[at]]
            for start in range(0, len(is_open), size)
        ]
        rows = bucket_of_rows(max(map(len, open_rows)))
        chosen, still_open = [], []
        for part, own in enumerate(open_rows):
            still_open += [at < len(own) for at in range(rows)]
            chosen += (own + [part * size] * rows)[:rows]
        kept = torch.tensor(chosen, device=places.device)
        layers = [(layer.keys[kept], layer.values[kept]) for layer in step.layers]
        smaller = self._step(replace(step.key, rows=rows), step.cache)
        # both buckets share their memory, and a new step has overwritten some of it
        if smaller is None:
            for layer, (keys, values) in zip(step.layers, layers, strict=True):
                layer.keys[kept], layer.values[kept] = keys, values
            return step, places, is_open
        for layer, (keys, values) in zip(smaller.layers, layers, strict=True):
            layer.keys.copy_(keys)
            layer.values.copy_(values)
        for name in ("tokens", "positions", "mask"):
            getattr(smaller, name).copy_(getattr(step, name)[kept])
        for name in ("temperature", "ends", "column"):
            getattr(smaller, name).copy_(getattr(step, name))
        if smaller.rows.preferences is not None:
            smaller.rows.preferences.copy_(step.rows.preferences[kept])  # type: ignore[index]
        smaller.is_open.copy_(torch.tensor(still_open))
        return smaller, places[kept], still_open

    # --- Steps ------------------------------------------------------------------------------------

    def _replay(self, step: Step) -> None:
        """Takes a step; the context of the adapters is open."""
        if self._base is self._model:
            step.replay()
            return
        with forward_of(self._model).of(step.rows):
            step.replay()

    def _run(
        self, token_ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        return continued_pass(self._base, token_ids, mask, positions, cache).logits

    def _step(self, key: Key, like: Any) -> Step | None:
        """Returns the step of a bucket, compiled where it is new; None if that fails."""
        num_rows = key.num_parts * key.rows
        layers = self._layers(num_rows, key.length, like)
        if key in self._steps:
            return self._steps[key]
        device = self._model.device
        size = (num_rows, key.num_shares)
        preferences = torch.zeros(size, device=device) if key.num_shares else None
        rows = StepRows(preferences, is_base=key.is_base)
        step = Step(key, self._run, layers, rows, device)
        start = time.perf_counter()
        try:
            if self._backend is not None:
                # code of its own, whose graphs are not compared with those of other buckets
                code = types.FunctionType(_take_step.__code__.replace(), globals())
                compiled = torch.compile(code, backend=self._backend, dynamic=False, fullgraph=True)
                step.replay = lambda: compiled(step)
                self._replay(step)
            if device.type == "cuda":
                step.replay = self._capture(step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any backend; the model runs as it is
            if interruption := interruption_in(error):
                raise interruption from None
            # torch wraps a backend's error into one of its own
            self._fail(first_line(getattr(error, "inner_exception", None) or error))
            _check_random_numbers(device, error)
            return None
        seconds = time.perf_counter() - start
        if self._backend is not None:
            size = f"{num_rows} rows and {key.length} tokens"
            logger.warning("compiled the sampling of %s in %.0f seconds", size, seconds)
        self._steps[key] = step
        return step

    def _fail(self, reason: str) -> None:
        """Records why steps cannot be used, and releases their memory."""
        self.failure = reason
        self._steps.clear()
        self._folded.clear()
        self._storage = []

    def _capture(self, step: Step) -> Callable[[], Any]:
        """Records a step as a CUDA graph, whose replay is one call."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # memory and libraries are taken before
            for _ in range(2):
                step.column.zero_()
                step.index.zero_()
                self._replay(step)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        step.column.zero_()
        step.index.zero_()
        with torch.cuda.graph(graph):
            self._replay(step)
        return graph.replay

    def _layers(
        self, num_rows: int, length: int, like: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns views of the memory for keys and values, which all buckets share."""
        tensors = [own for layer in like.layers for own in (layer.keys, layer.values)]
        sizes = [torch.Size((num_rows, own.size(1), length, own.size(3))) for own in tensors]
        pairs = zip(sizes, self._storage, strict=False)
        if not self._storage or any(size.numel() > own.numel() for size, own in pairs):
            self._steps.clear()  # they have other memory
            self._storage = [
                own.new_zeros(size.numel()) for own, size in zip(tensors, sizes, strict=True)
            ]
        views = [
            own[: size.numel()].view(size) for own, size in zip(self._storage, sizes, strict=True)
        ]
        return list(zip(views[::2], views[1::2], strict=True))


def _take_step(step: Step) -> None:
    step.step()


def _check_random_numbers(device: torch.device, error: Exception) -> None:
    """Checks that a failed step has left the device's random numbers usable.

    Raises:
        RuntimeError: They are not, as after a recording of a CUDA graph that was broken off.
    """
    if device.type != "cuda":
        return
    try:
        with torch.random.fork_rng([device]):
            torch.rand(1, device=device)
    except RuntimeError:
        raise RuntimeError(
            f"{device} draws no random numbers any more after a sampling step that could not be "
            f"recorded ({first_line(error)}). Run again with rollout.compile: false."
        ) from error


def compiles(model: Any, config: RolloutConfig) -> bool:
    """Returns whether replies of a model are sampled by compiled steps; logs once why not.

    Any step may still fail to compile.
    """
    if config.compile is not True:
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not takes_attention_masks(model):
        reason = "does not keep the keys and values of all tokens for torch's own attention"
        if has_plain_cache(model):
            reason = "needs the mask of tokens, not attention's alone"
        _explain(model, f"{type(base).__name__} {reason}")
        return False
    if len({parameter.device for parameter in base.parameters()}) > 1:
        _explain(model, "the policy's layers are on several devices")
        return False
    return True


def sample_compiled(
    model: Any, first: Prefilled, parts: Sequence[SamplingPart], **rows: Any
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Samples by compiled steps of a model that `compiles`, as `CompiledDecoder.sample`.

    Returns None, after the reason was logged, where they cannot be used.
    """
    ends = parts[0].end_ids
    if len({(part.temperature, part.max_new_tokens, tuple(part.end_ids)) for part in parts}) > 1:
        return _explain(model, "the clients have different settings of rollouts")
    if len(ends) > NUM_ENDS:
        return _explain(model, f"there are {len(ends)} end tokens, more than {NUM_ENDS}")
    decoder = vars(model).get("compiled_decoder")  # not that of a model inside
    if decoder is None:
        model.compiled_decoder = decoder = CompiledDecoder(model)
    results = decoder.sample(first, parts, **rows)
    if results is None:
        _explain(model, decoder.failure or "its steps could not be compiled")
    return results


def _explain(model: Any, reason: str) -> None:
    """Logs why a model's steps are not compiled; once per model."""
    if "is_not_compiled" not in vars(model):
        model.is_not_compiled = True
        logger.warning("rollout.compile: replies are sampled without compiled steps: %s", reason)


def bucket_of_rows(count: int) -> int:
    """Returns the smallest power of 2 that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def bucket_of_lengths(length: int) -> int:
    """Returns the smallest of 64, 96, 128, 192, 256, 384, ... that is at least `length`."""
    size = max(64, bucket_of_rows(length))
    return 3 * size // 4 if size > 64 and length <= 3 * size // 4 else size
