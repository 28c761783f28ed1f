"""Batched decoding of a causal language model with torch and transformers, on the CPU or an accelerator.

The rollout of the verl plugin and the evaluation stage both use it, so a model is scored by the code that
trained it. Nothing here knows of verl or Ray, and importing this module does not import torch.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from verl_workflow.errors import ErrorCode, UserError, VerlWorkflowError

if TYPE_CHECKING:
    import torch

__all__ = ["DecodeRequest", "Decoded", "StopReason", "decode"]

GREEDY_BELOW = 1e-6
"""A temperature up to this is read as 0: dividing by less would overflow float32 logits."""

STEPS_BETWEEN_LOOKS = 8
"""Steps between two reads of an accelerator, each of which waits for it. On the CPU every step may look."""


class StopReason(str, enum.Enum):
    """Why a sequence ended."""

    EOS = "eos"
    """It produced one of the end-of-sequence ids, which is its last id."""
    LENGTH = "length"
    """It reached its `max_tokens`."""
    ABORTED = "aborted"
    """`should_abort` said so; what had been produced is returned."""


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """One prompt and how to continue it.

    Args:
        prompt_ids: the prompt's token ids, at least one.
        max_tokens: the most tokens to produce, at least 1.
        temperature: 0 takes the most likely token each time; otherwise logits are divided by it.
        top_p: keep the smallest set of most likely tokens that holds at least this probability, in (0, 1].
        top_k: keep this many most likely tokens (and ties with the last); 0 or less keeps all. It is applied
            before `top_p`.
        ignore_eos: go on to `max_tokens` whatever is produced.
        seed: of its own randomness, 0 or more: the same seed, prompt and model give the same answer whatever else is
            in the batch, but for what another rounding of sums may tip over. None: it takes from the batch's.

    Raises:
        UserError: `data_invalid`, a value is out of its range.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise _refused("prompt_ids is empty", list(self.prompt_ids), "Give at least one token")
        if self.max_tokens < 1:
            raise _refused("max_tokens is below 1", self.max_tokens, "Ask for at least one token")
        if not 0 <= self.temperature < float("inf"):
            raise _refused("temperature is not a number >= 0", self.temperature, "Use 0 for greedy decoding")
        if not 0 < self.top_p <= 1:
            raise _refused("top_p is outside (0, 1]", self.top_p, "Use 1 to keep all tokens")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature <= GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What one request produced.

    Args:
        ids: the produced token ids, the end-of-sequence id included.
        log_probs: one a token: the natural logarithm of its probability in the distribution it was sampled from,
            that is after temperature, top-k and top-p. A greedy request, which samples from nothing, gets the
            model's own (temperature 1).
        stop_reason: why it ended.
    """

    ids: list[int]
    log_probs: list[float]
    stop_reason: StopReason


def decode(
    model: Any,
    requests: Sequence[DecodeRequest],
    *,
    eos_ids: Iterable[int],
    pad_id: int,
    generator: torch.Generator | None = None,
    should_abort: Callable[[], bool] = lambda: False,
) -> list[Decoded]:
    """Continue all requests as one batch and return their results in order.

    Prompts are padded on the left, and a step makes one token for each row from cached keys and values. Equal
    prompts are read once, and finished rows leave the batch when half of it is done, so neither the samples of a
    group nor one long answer cost a whole batch. Memory grows with the number of requests: cutting them into
    batches is the caller's part.

    Args:
        model: a transformers causal language model in evaluation mode; it may live on any one device.
        requests: any number, none included.
        eos_ids: the ids that end a sequence; none means that only `max_tokens` does.
        pad_id: fills the left of short prompts; any valid id, as padding is masked.
        generator: source of randomness, on the model's device, for requests without a seed; torch's global one when
            left out. The same state, model and batch give the same result on the same machine.
        should_abort: asked before each token after the first; True ends all unfinished sequences.

    Raises:
        VerlWorkflowError: `model_invalid`, the model produced logits that are not numbers.
    """
    import torch

    if not requests:
        return []
    with torch.inference_mode():
        return _decode(model, requests, frozenset(eos_ids), pad_id, generator, should_abort)


@dataclass(kw_only=True)
class _Rows:
    """The sequences still in the batch: tensors with one entry a row."""

    index: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    position: torch.Tensor
    limit: torch.Tensor
    ignore_eos: torch.Tensor
    done: torch.Tensor
    sampling: _Sampling

    def take(self, keep: torch.Tensor) -> _Rows:
        """Only the rows at these positions."""
        tensors = {f.name: getattr(self, f.name)[keep] for f in fields(self) if f.name != "sampling"}
        return _Rows(**tensors, sampling=self.sampling.take(keep))


@dataclass(kw_only=True)
class _Sampling:
    """How each row picks its next token. The flags live on the host: reading a device would wait for it."""

    drawn: torch.Tensor
    greedy: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    any_greedy: bool
    all_greedy: bool
    max_k: int
    any_p: bool

    @classmethod
    def of(
        cls, requests: Sequence[DecodeRequest], device: torch.device, generator: torch.Generator | None
    ) -> _Sampling:
        import torch

        # A greedy row is not filtered: its log-probabilities are the model's own.
        ks = [r.top_k if r.top_k > 0 and not r.greedy else 0 for r in requests]
        ps = [1.0 if r.greedy else r.top_p for r in requests]
        temperatures = [1.0 if r.greedy else r.temperature for r in requests]
        return cls(
            drawn=_drawn(requests, device, generator),
            greedy=torch.tensor([r.greedy for r in requests], device=device),
            temperature=torch.tensor(temperatures, device=device).unsqueeze(1),
            top_k=torch.tensor(ks, device=device),
            top_p=torch.tensor(ps, device=device).unsqueeze(1),
            any_greedy=any(r.greedy for r in requests),
            all_greedy=all(r.greedy for r in requests),
            max_k=max(ks),
            any_p=min(ps) < 1,
        )

    def take(self, keep: torch.Tensor) -> _Sampling:
        return _Sampling(
            drawn=self.drawn[keep],
            greedy=self.greedy[keep],
            temperature=self.temperature[keep],
            top_k=self.top_k[keep],
            top_p=self.top_p[keep],
            any_greedy=self.any_greedy,
            all_greedy=self.all_greedy,
            max_k=self.max_k,
            any_p=self.any_p,
        )

    def pick(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row and its log-probability."""
        import torch

        log_probs = self._filtered(logits / self.temperature).log_softmax(-1)
        if self.all_greedy:
            token = log_probs.argmax(-1)
        else:
            # The first token up to which the probabilities hold what was drawn; one without any is never it.
            held = log_probs.exp().double().cumsum(-1)
            place = self.drawn[:, step : step + 1] * held[:, -1:]
            token = torch.searchsorted(held, place, right=True).squeeze(1)
            if self.any_greedy:
                token = torch.where(self.greedy, log_probs.argmax(-1), token)
        return token, log_probs.gather(1, token.unsqueeze(1)).squeeze(1)

    def _filtered(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        if self.max_k:
            best = logits.topk(min(self.max_k, logits.size(-1)), dim=-1).values
            place = (self.top_k - 1).clamp(min=0, max=best.size(-1) - 1).unsqueeze(1)
            floor = best.gather(1, place).masked_fill((self.top_k == 0).unsqueeze(1), float("-inf"))
            logits = logits.masked_fill(logits < floor, float("-inf"))
        if self.any_p:
            ordered, order = logits.sort(dim=-1, descending=True)
            probs = ordered.softmax(-1)
            # What the more likely tokens hold already. The first token is always kept, and top_p = 1 keeps all,
            # although a rounded sum may reach 1 early.
            before = probs.cumsum(-1) - probs
            drop = (before >= self.top_p) & (self.top_p < 1)
            drop[:, 0] = False
            logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf"))
        return logits


def _drawn(requests: Sequence[DecodeRequest], device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """A number in [0, 1) for each row and step; a little below 1, so that no product with a sum rounds up to it."""
    import torch

    steps = max(request.max_tokens for request in requests)
    # Nothing is taken from the batch's randomness for those who do not need it.
    of_batch = [place for place, one in enumerate(requests) if one.seed is None and not one.greedy]
    drawn = torch.zeros((len(requests), steps), dtype=torch.float64)
    if of_batch:
        drawn[of_batch] = torch.rand(
            (len(of_batch), steps), dtype=torch.float64, device=device, generator=generator
        ).cpu()
    for place, one in enumerate(requests):
        if one.seed is not None and not one.greedy:
            own = torch.Generator().manual_seed(one.seed)
            drawn[place, : one.max_tokens] = torch.rand(one.max_tokens, dtype=torch.float64, generator=own)
    return (drawn * (1 - 2**-50)).to(device)


def _decode(
    model: Any,
    requests: Sequence[DecodeRequest],
    eos_ids: frozenset[int],
    pad_id: int,
    generator: torch.Generator | None,
    should_abort: Callable[[], bool],
) -> list[Decoded]:
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    look_every = 1 if device.type == "cpu" else STEPS_BETWEEN_LOOKS
    count, steps = len(requests), max(r.max_tokens for r in requests)
    takes = inspect.signature(model.forward).parameters
    only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)

    # The tokens are gathered on the device and read once, at the end.
    tokens = torch.full((count, steps), pad_id, dtype=torch.long, device=device)
    log_probs = torch.zeros((count, steps), device=device)
    lengths = torch.zeros(count, dtype=torch.long, device=device)
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    broken = torch.zeros((), dtype=torch.bool, device=device)

    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
    # The state of linear attention cannot be indexed by row: such models go without the two savings.
    by_row = all(hasattr(layer, "batch_select_indices") for layer in cache.layers)
    rows, width = _read_in(requests, pad_id, steps, device, generator)
    prompts, spread = _unique(rows, requests) if by_row else (rows, None)
    for step in range(steps):
        if step and should_abort():
            break
        if step and step % look_every == 0:
            open_rows = (~rows.done).nonzero().squeeze(1)
            if bool(broken) or not len(open_rows):
                break
            if 2 * len(open_rows) <= len(rows.done) and by_row:
                cache.batch_select_indices(open_rows)
                rows = rows.take(open_rows)
        batch = rows if step else prompts
        out = model(
            input_ids=batch.ids,
            attention_mask=batch.mask[:, : width + step],
            position_ids=batch.position,
            past_key_values=cache,
            use_cache=True,
            **only_last,
        )
        cache, logits = out.past_key_values, out.logits[:, -1, :].float()
        if not step and spread is not None:
            cache.batch_select_indices(spread)
            logits = logits[spread]
        broken |= logits.isnan().any()
        # Sampling from NaN stops a CUDA device for good; the flag stops the batch at the next look instead.
        token, log_prob = rows.sampling.pick(logits.nan_to_num(nan=0.0, neginf=float("-inf")), step)

        live = ~rows.done
        at_end = torch.isin(token, eos) & ~rows.ignore_eos
        tokens[rows.index, step] = torch.where(live, token, pad_id)
        log_probs[rows.index, step] = torch.where(live, log_prob, 0.0)
        lengths[rows.index] += live
        ended[rows.index] |= live & at_end
        rows.done = rows.done | at_end | (step + 1 >= rows.limit)
        rows.ids, rows.position = token.unsqueeze(1), rows.position[:, -1:] + 1

    if bool(broken):
        raise VerlWorkflowError(
            ErrorCode.MODEL_INVALID,
            "the model produced logits that are not numbers",
            remedy="Its weights are damaged or training has diverged: look at its loss and gradient norm",
        )
    return [
        Decoded(ids=ids[:length], log_probs=probs[:length], stop_reason=_reason(eos_seen, length, request))
        for request, ids, probs, length, eos_seen in zip(
            requests, tokens.tolist(), log_probs.tolist(), lengths.tolist(), ended.tolist(), strict=True
        )
    ]


def _read_in(
    requests: Sequence[DecodeRequest],
    pad_id: int,
    steps: int,
    device: torch.device,
    generator: torch.Generator | None,
) -> tuple[_Rows, int]:
    """The padded prompts, one row a request, with room in the mask for `steps` tokens; and their width."""
    import torch

    width = max(len(r.prompt_ids) for r in requests)
    ids = torch.full((len(requests), width), pad_id, dtype=torch.long)
    mask = torch.ones((len(requests), width + steps), dtype=torch.long)
    for row, request in enumerate(requests):
        start = width - len(request.prompt_ids)
        ids[row, start:] = torch.tensor(list(request.prompt_ids), dtype=torch.long)
        mask[row, :start] = 0
    rows = _Rows(
        index=torch.arange(len(requests), device=device),
        ids=ids.to(device),
        mask=mask.to(device),
        position=(mask[:, :width].cumsum(-1) - 1).clamp(min=0).to(device),
        limit=torch.tensor([r.max_tokens for r in requests], device=device),
        ignore_eos=torch.tensor([r.ignore_eos for r in requests], device=device),
        done=torch.zeros(len(requests), dtype=torch.bool, device=device),
        sampling=_Sampling.of(requests, device, generator),
    )
    return rows, width


def _unique(rows: _Rows, requests: Sequence[DecodeRequest]) -> tuple[_Rows, torch.Tensor | None]:
    """One row for each different prompt, and for each request the row of its prompt (None: its own row)."""
    import torch

    seen: dict[tuple[int, ...], int] = {}
    first: list[int] = []
    where: list[int] = []
    for row, request in enumerate(requests):
        place = seen.setdefault(tuple(request.prompt_ids), len(seen))
        if place == len(first):
            first.append(row)
        where.append(place)
    if len(first) == len(requests):
        return rows, None
    device = rows.ids.device
    return rows.take(torch.tensor(first, device=device)), torch.tensor(where, device=device)


def _reason(eos_seen: bool, length: int, request: DecodeRequest) -> StopReason:
    if eos_seen:
        return StopReason.EOS
    return StopReason.LENGTH if length >= request.max_tokens else StopReason.ABORTED


def _refused(what: str, value: Any, remedy: str) -> UserError:
    return UserError(ErrorCode.DATA_INVALID, what, value=value, remedy=remedy)
