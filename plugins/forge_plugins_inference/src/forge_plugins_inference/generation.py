"""Sampling from a model, for any model that offers a cache."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from forge_core.contracts.model import GenerativeModel
from forge_core.errors import ConfigError, NonFiniteError

PREFILL_CHUNK = 512
"""Prompt tokens in one forward: it bounds the logits, of which only the last are wanted, to ``B × 512 × V``."""
ENDED = -1
"""What a row yields once it has reached the stop token."""


def generate(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | None = None,
    generator: torch.Generator | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    forbidden: Sequence[int] = (),
    has_ended: Callable[[Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        prompts: token ids; the lengths may differ. A row's continuation does not depend on the other rows, except that
            the random numbers are drawn for the whole batch.
        max_new_tokens: at most this many for each prompt; 0 gives none.
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_k: sample from this many likeliest tokens; 0 from all.
        top_p: sample from the smallest set of likeliest tokens whose probability reaches this.
        stop: the token after which a row produces nothing further; it is not part of the result.
        generator: for repeatable samples, on the model's device.
        inputs: further entries of a batch, such as images, for the forward of the prompts, which is then not cut into
            chunks. Those with positions have as many as the longest prompt, and are padded on the left.
        forbidden: token ids that are never sampled, such as the place of an image.
        has_ended: whether the new tokens of a prompt are all that is wanted of it, besides ``stop``. What it needed to
            see of them stays in the result.

    Returns:
        The new tokens of each row, without the prompt.

    Raises:
        ConfigError: a setting is out of range; a prompt is empty, has ids outside the vocabulary, or leaves no room;
            all token ids are forbidden.
        NonFiniteError: logits are infinite or not a number.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    left = set(range(len(rows)))
    steps = generate_steps(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        generator=generator,
        inputs=inputs,
        forbidden=forbidden,
    )
    for step in steps:
        for number, token in enumerate(step.tolist()):
            if number not in left:
                continue
            if token != ENDED:
                rows[number].append(token)
            if token == ENDED or (has_ended is not None and has_ended(rows[number])):
                left.remove(number)
        if not left:
            steps.close()
    return rows


def generate_steps(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | None = None,
    generator: torch.Generator | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    forbidden: Sequence[int] = (),
) -> Generator[torch.Tensor, None, None]:
    """Same as ``generate``, one step at a time: yields ``(B,)`` int64 new tokens, −1 for rows that have ended.

    The model is in evaluation mode until the iterator is exhausted or closed, and then as it was before.

    Raises:
        NonFiniteError: a row's largest logit is infinite or not a number.
    """
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    _check_prompts(prompts, model, max_new_tokens)
    _check_forbidden(forbidden, model)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        if not bool(logits.amax(-1).isfinite().all()):
            raise NonFiniteError(
                f"the model's logits are not finite in {str(logits.dtype).removeprefix('torch.')}, and no token can be "
                "sampled from them: its weights are not finite, or values overflow on the way"
            )
        if forbidden:
            there = [token for token in forbidden if token < logits.shape[-1]]  # a head may lack tokens of the input
            logits = logits.index_fill(-1, torch.tensor(there, dtype=torch.int64, device=logits.device), -torch.inf)
        return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)

    return _steps(model, prompts, max_new_tokens, stop, choose, inputs or {})


def sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """One token a row: ``(B, V)`` logits of any floating dtype to ``(B,)`` int64. Settings as in ``generate``; top-k is
    applied before top-p (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751)."""
    if temperature == 0:
        return logits.argmax(-1)
    # of the distance to the likeliest, in float64, which MPS lacks: a temperature all but 0 leaves nothing else
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    logits = (logits.to(wide) - logits.max(-1, keepdim=True).values) / max(temperature, torch.finfo(wide).tiny)
    if 0 < top_k < logits.shape[-1]:
        likeliest, which = logits.topk(top_k, dim=-1)  # no more of them where several are equal, as in bf16
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, which, likeliest)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        likelier = probability.cumsum(-1) - probability
        ordered = ordered.masked_fill(likelier >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()  # and not inference_mode: a model that goes on training may keep tensors made here (FSDP does)
def _steps(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: int | None,
    choose: Callable[[torch.Tensor], torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
) -> Generator[torch.Tensor, None, None]:
    module = cast("nn.Module", model)
    device = next(module.parameters()).device
    tokens, positions = _left_padded(prompts, device)
    cache = model.make_cache(len(prompts), tokens.shape[1] + max_new_tokens)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    training = module.training
    module.eval()
    try:
        further = {name: one.to(device) for name, one in inputs.items()}
        length = tokens.shape[1] if further else PREFILL_CHUNK
        for start in range(0, tokens.shape[1], length):
            chunk = slice(start, start + length)
            where = None if positions is None else positions[:, chunk]
            logits = _last_logits(model, tokens[:, chunk], where, cache, further)
        for step in range(1, max_new_tokens + 1):
            new = choose(logits)
            if stop is not None:
                ended = ended | (new == stop)
            yield new.masked_fill(ended, ENDED)
            if step == max_new_tokens or (stop is not None and bool(ended.all())):
                return
            where = None if positions is None else positions[:, -1:] + step
            logits = _last_logits(model, new.unsqueeze(1), where, cache, {})
    finally:
        module.train(training)


def _last_logits(
    model: GenerativeModel,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    cache: object,
    further: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    inputs = {} if positions is None else {"positions": positions}
    logits = model(tokens, cache=cache, **inputs, **further)  # type: ignore[operator]  # a module; its protocol has only `forward`
    return cast("torch.Tensor", logits)[:, -1]


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(B, S)`` token ids, and ``(B, S)`` positions with −1 at padding; no positions if there is no padding."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    if all(len(prompt) == width for prompt in prompts):
        return tokens, None
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return tokens, (torch.arange(width, device=device) - (width - lengths)[:, None]).clamp(min=-1)


def _check_settings(max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be 0 (nothing is sampled) or more, got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be 0 (the likeliest token) or more, got {temperature}")
    if top_k < 0:
        raise ConfigError(f"top_k must be 0 (all tokens) or more, got {top_k}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1 (all tokens), got {top_p}")


def _check_forbidden(forbidden: Sequence[int], model: GenerativeModel) -> None:
    for token in forbidden:
        if not 0 <= token < model.vocab_size:
            raise ConfigError(f"forbidden has the token id {token}; the model's are 0 to {model.vocab_size - 1}")
    if len(set(forbidden)) >= model.vocab_size:
        raise ConfigError("forbidden has all token ids of the model, so that none could be sampled")


def _check_prompts(prompts: Sequence[Sequence[int]], model: GenerativeModel, max_new_tokens: int) -> None:
    if not prompts or not all(map(len, prompts)):
        raise ConfigError("a prompt is empty: give each at least one token")
    for prompt in prompts:
        if min(prompt) < 0 or max(prompt) >= model.vocab_size:
            worst = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ConfigError(
                f"a prompt has the token id {worst}; the model's vocabulary ends at {model.vocab_size - 1}"
            )
    longest = max(map(len, prompts))
    if longest + max_new_tokens > model.max_seq_len:
        left = model.max_seq_len - longest
        room = f"max_new_tokens may be {left} at most" if left > 0 else "shorten the prompt"
        raise ConfigError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the model's longest sequence, "
            f"{model.max_seq_len} tokens; {room}"
        )
