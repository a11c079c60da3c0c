"""The kNN-LM: a causal model, a database of its hidden states, and the mixture of what both say."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

try:
    from transformers import LogitsProcessor
except ModuleNotFoundError as missing:
    from softdb.errors import MissingDependency

    raise MissingDependency("a language model with a memory needs: pip install 'softdb[transformers]'") from missing

import softdb
from softdb import check
from softdb.answers import Pooled
from softdb.database import SoftDB
from softdb.errors import BadInput
from softdb.integrations.transformers.hidden import (
    HiddenStates,
    Text,
    context_of,
    first_temperature,
    forward,
    head_of,
    padded,
    predicting,
    prompts_of,
    records_of,
    require_made_by,
    tokens_of,
    unstored,
    windows_of,
)
from softdb.scoring import NegativeL2

Progress: TypeAlias = Callable[[str, int, int], None]

QUERIES = 512  # places asked at once
MAX_LR = 10.0  # Adam moves log T and the logit of λ by about lr a step


class Mixture(torch.nn.Module):
    """Learned parameters of a language model with a memory: the temperature T, and λ, a number or a gate λ(h).

        λ = σ(b),   or with a gate   λ(h) = σ(b + w·x),  x = (h, log Σ_i exp(-‖h - k_i‖² / T)) standardised

    The second part of x tells how near the memory is at all (as in He et al. 2021, section 3.1). T is the square of the
    bandwidth of `score`. A gate begins with w = 0. `state_dict()` holds all of it.
    """

    def __init__(self, dim: int, temperature: float, interpolation: float, gated: bool) -> None:
        super().__init__()
        self.score = NegativeL2(math.sqrt(temperature), learnable=True)
        self.bias = torch.nn.Parameter(torch.tensor(math.log(interpolation / (1 - interpolation))))
        self.gate = torch.nn.Linear(dim + 1, 1, bias=False) if gated else None
        if self.gate is not None:
            torch.nn.init.zeros_(self.gate.weight)
        self.register_buffer("mean", torch.zeros(dim + 1))
        self.register_buffer("deviation", torch.ones(dim + 1))

    @property
    def temperature(self) -> float:
        """T."""
        return float(self.score.bandwidth.detach()) ** 2

    def logits(self, hidden: Tensor, lse: Tensor) -> Tensor:  # (q, d), (q,) -> (q, 1)
        """log λ / (1 - λ) at each place."""
        if self.gate is None:
            return self.bias.expand(len(hidden), 1)
        known = torch.cat([hidden, lse.unsqueeze(1)], 1).nan_to_num(neginf=0.0)
        found: Tensor = self.bias + self.gate((known - self.mean) / self.deviation)
        return found

    @torch.no_grad()
    def standardise(self, hidden: Tensor, lse: Tensor) -> None:  # (m, d), (m,)
        """Take mean and deviation of the gate's inputs from these."""
        known = torch.cat([hidden, lse.unsqueeze(1)], 1)
        self.mean, self.deviation = known.mean(0), known.std(0).clamp(min=1e-6)

    def mixed(self, memory: Tensor, model: Tensor, logits: Tensor) -> Tensor:  # (q, v), (q, v), (q, 1) -> (q, v)
        """log p of log p_memory and log p_model."""
        log = torch.nn.functional.logsigmoid
        return torch.logaddexp(log(logits) + memory, log(-logits) + model)


class KNNLanguageModel(LogitsProcessor):
    """A causal language model and a database of its hidden states with the tokens that followed them.

    It is a `LogitsProcessor`: after a forward pass of the model it turns the logits of the last token of each row into
    log p, so that `generate` works, with batches, left padding, a cache and beams. The hidden states are caught on
    their way into the output head, until `close()`. Tokens that an earlier processor forbade stay forbidden.

    Cost a token: that of the model and of the soft query, n d over every record, a search with `k=`.

    Args:
        model: a causal model with an output head, such as AutoModelForCausalLM gives; not trained here, nor changed.
        db: as `from_corpus` makes it: keys as wide as the head's input, num_classes the size of the vocabulary.
        tokenizer: of the model; None: texts are given as lists of token ids.
        k: sum over the k nearest records alone, as the paper does; rtol: over all of them, to a tolerance, which an
            index makes cheaper; neither: over all of them exactly.
        interpolation: λ at first, between 0 and 1.
        temperature: T at first; None: the median squared distance of some records to the 8th nearest other one.
        gate: learn λ(h) in place of one λ.

    Raises BadInput for a model without a head or with an encoder, another width or vocabulary than the database's, a
    database without records, or of another model's hidden states.

        lm = KNNLanguageModel.from_corpus(model, texts, "memory", tokenizer=tokenizer)
        lm.fit(other_texts)
        lm.perplexity(held_out), lm.perplexity(held_out, memory=False)
        lm.generate("The", max_new_tokens=20)
    """

    def __init__(
        self,
        model: Any,
        db: SoftDB,
        *,
        tokenizer: Any = None,
        k: int | None = None,
        rtol: float | None = None,
        interpolation: float = 0.25,
        temperature: float | None = None,
        gate: bool = False,
    ) -> None:
        self.model, self.db, self.tokenizer, self.k, self.rtol = model, db, tokenizer, k, rtol
        check.tolerance(rtol, 0.0, 0.95, None, k)
        share = check.share(interpolation, "interpolation")
        if share in (0, 1):
            raise BadInput(f"interpolation is {share:g}; expected a share between 0 and 1, such as 0.25")
        self.head = head_of(model, tokenizer)
        require_made_by(db, HiddenStates(model, tokenizer, self.head), self.head)
        heat = first_temperature(db) if temperature is None else check.positive(temperature, "temperature")
        self.mixture = Mixture(db.dim, heat, share, gate).requires_grad_(False)
        self._hidden: Tensor | None = None
        self._hook = self.head.register_forward_pre_hook(self._catch)

    @classmethod
    def from_corpus(
        cls,
        model: Any,
        texts: Sequence[Text],
        path: str | os.PathLike[str] | None = None,
        *,
        tokenizer: Any = None,
        dtype: Literal["float32", "float16"] = "float16",
        batch_size: int = 16,
        progress: Progress | None = None,
        **settings: Any,
    ) -> KNNLanguageModel:
        """Build the database of a corpus, and the language model on it.

        One record a token but each text's first: key the hidden state before it, value the token. A text longer than
        the model's context, or 1,024 tokens, is taken in windows that overlap by half. Texts of some 16,384 tokens are
        one commit: a call that was broken off goes on where it stopped when it is called again with the same texts.

        Args:
            texts: m texts, or, without a tokenizer, m lists of token ids.
            path: where the database goes; None: in memory.
            dtype: of the stored keys.
            batch_size: windows that pass through the model together.
            progress: called with what is being done, how many texts are done, and the whole.
            settings: further arguments of the class.

        Cost: a pass of the corpus through the model, without its head. Raises BadInput for a corpus without a token to
        predict, and a database at `path` that was not begun with these texts.
        """
        head = head_of(model, tokenizer)
        made = HiddenStates(model, tokenizer, head)
        tokens = tokens_of(texts, tokenizer, head)
        lengths = [max(0, len(token) - 1) for token in tokens]
        if not sum(lengths):
            raise BadInput(f"the corpus of {len(tokens)} texts has no token that follows another; give longer texts")
        size, (classes, dim) = check.integer(batch_size, "batch_size"), head.weight.shape
        db = softdb.open(path, dim=dim, num_classes=classes, metric="l2", dtype=dtype, encoder=made)
        with contextlib.ExitStack() as opened:
            opened.callback(db.close)
            for low, high in unstored(db, tokens, lengths):
                start = sum(lengths[:low])
                keys, labels = records_of(model, head, tokens[low:high], size)
                db.insert(range(start, start + len(keys)), keys, labels)
                if progress is not None:
                    progress("embed", high, len(tokens))
            found = cls(model, db, tokenizer=tokenizer, **settings)
            opened.pop_all()
        return found

    @torch.no_grad()
    def log_probs(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:  # (q, d), (q, v) -> (q, v)
        """log p of every token after some hidden states and the model's own logits; None: of the memory alone."""
        parts = []
        for low in range(0, len(hidden), QUERIES):
            some = hidden[low : low + QUERIES].float()
            answer = self._asked(some, self.mixture, None)
            memory = answer.output.log()
            if logits is not None:
                own = logits[low : low + QUERIES].float().log_softmax(1).to(memory.device)
                memory = self.mixture.mixed(memory, own, self.mixture.logits(some, answer.lse).to(memory.device))
            parts.append(memory)
        return torch.cat(parts)

    def perplexity(self, texts: Sequence[Text], *, memory: bool = True, batch_size: int = 8) -> float:
        """exp of the mean of -log p over every token of the texts but each one's first; without `memory` the model's.

        Raises BadInput for texts without a token to predict.
        """
        total, count = 0.0, 0
        for hidden, logits, wanted in self._places(texts, batch_size):
            logs = self.log_probs(hidden, logits) if memory else logits.float().log_softmax(1)
            total -= float(logs.gather(1, wanted.to(logs.device).unsqueeze(1)).double().sum())
            count += len(wanted)
        return math.exp(total / count)

    def fit(
        self,
        texts: Sequence[Text],
        *,
        epochs: int = 5,
        lr: float = 0.1,
        batch_size: int = 256,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> list[float]:
        """Learn λ, or its gate, and T from texts that are not in the memory; the perplexity as each epoch went.

            loss = mean over tokens of -log(λ p_memory(y | h) + (1 - λ) p_model(y | h)),  by Adam

        The gradient to T goes through the soft query, exactly, over the k nearest or drawn, as the class was told.
        Texts of the memory would find themselves at distance 0 and teach λ = 1. The model itself stays as it is.

        Args:
            texts: some thousand tokens are enough: they are held in memory as hidden states, d numbers each.
            epochs, lr: of Adam; a gate is trained at a tenth of the rate.
            batch_size: tokens a step.
            seed: of the order, and of what `rtol` draws.
            progress: called with what is being done, how many steps are done, and the whole.

        Cost a step: a soft query of the batch, forth and back. Raises BadInput for settings that make no sense, and
        where the loss becomes NaN or infinite: then what was learned before stays.
        """
        epochs, size = check.integer(epochs, "epochs"), check.integer(batch_size, "batch_size")
        rate = check.positive(lr, "lr")
        if rate > MAX_LR:
            raise BadInput(f"lr is {rate:g}; expected at most {MAX_LR:g}, such as 0.1")
        draws = torch.Generator().manual_seed(check.integer(seed, "seed", 0, 2**63 - 1))
        with torch.inference_mode(False):
            known = [
                (hidden.float(), logits.float().log_softmax(1).gather(1, wanted.unsqueeze(1)), wanted)
                for hidden, logits, wanted in self._places(texts, 8)
            ]
            states, own, labels = (torch.cat(part) for part in zip(*known, strict=True))
            mixture = copy.deepcopy(self.mixture).requires_grad_(True)
            if mixture.gate is not None:
                first = states[torch.randperm(len(states), generator=draws)[: 2 * QUERIES]]
                mixture.standardise(first, self._asked(first, mixture, None).lse)
            gate = [] if mixture.gate is None else list(mixture.gate.parameters())
            others = [parameter for parameter in mixture.parameters() if not any(parameter is mine for mine in gate)]
            adam = torch.optim.Adam([{"params": others, "lr": rate}, {"params": gate, "lr": rate / 10}])
            found, steps = [], -(-len(states) // size)
            for epoch in range(epochs):
                total = 0.0
                for step, part in enumerate(torch.randperm(len(states), generator=draws).split(size), 1):  # type: ignore[no-untyped-call]
                    loss = self._loss(mixture, states[part], own[part], labels[part], draws)
                    adam.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    adam.step()
                    total += float(loss.detach()) * len(part)
                    if not (
                        math.isfinite(total)
                        and all(bool(parameter.isfinite().all()) for parameter in mixture.parameters())
                    ):
                        raise BadInput(f"the loss became {total:g} in epoch {epoch + 1}; lower lr, which is {rate:g}")
                    if progress is not None:
                        progress(f"epoch {epoch + 1}", epoch * steps + step, epochs * steps)
                found.append(math.exp(total / len(states)))
            self.mixture = mixture.requires_grad_(False)
        return found

    @torch.enable_grad()
    def _loss(self, mixture: Mixture, hidden: Tensor, own: Tensor, labels: Tensor, draws: torch.Generator) -> Tensor:
        """-log p of the labels, by log p_model of them."""
        answer = self._asked(hidden, mixture, draws)
        found = answer.output.gather(1, labels.unsqueeze(1))
        memory = found.clamp(min=torch.finfo(found.dtype).tiny).log()  # whose gradient is 0 where a label has no weight
        return -mixture.mixed(memory, own, mixture.logits(hidden, answer.lse)).mean()

    def _asked(self, hidden: Tensor, mixture: Mixture, draws: torch.Generator | None) -> Pooled:
        draws = draws if self.rtol is not None else None
        return self.db.attend(hidden, score=mixture.score, k=self.k, rtol=self.rtol, generator=draws)

    def generate(self, inputs: Any = None, **words: Any) -> Any:
        """`model.generate` with the memory: texts give texts, where there is a tokenizer; token ids give token ids.

        Args:
            inputs: a text, or several; token ids, a tensor (q, t) or q lists, which are padded left; or as keywords
                what `model.generate` takes.
            words: of `model.generate`. A `logits_processor` of yours goes before the memory.

        Raises BadInput for assisted generation, which asks for several tokens at once, and for other inputs.
        """
        assisted = [name for name in ("assistant_model", "prompt_lookup_num_tokens") if words.get(name) is not None]
        if assisted:
            raise BadInput(f"{assisted[0]} is given, but a memory answers for one token at a time; leave it out")
        words["logits_processor"] = [*(words.get("logits_processor") or ()), self]
        if inputs is None or isinstance(inputs, Tensor):
            return self.model.generate(inputs, **words)
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str | list) for text in texts):
            raise BadInput(f"inputs are {check.shown(inputs)}; expected a text, texts, or token ids (q, t)")
        told = isinstance(texts[0], str)
        if told and self.tokenizer is None:
            raise BadInput("texts are given without a tokenizer; give token ids, or tokenizer= to the class")
        prompts = prompts_of(texts, self.tokenizer, self.head) if told else tokens_of(texts, None, self.head)
        made = self.model.generate(**words, **padded(prompts, self.model.device, left=True))
        found = self.tokenizer.batch_decode(made, skip_special_tokens=True) if told else made
        return found[0] if isinstance(inputs, str) else found

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (q, t), (q, v) -> (q, v)
        """As transformers calls it: log p in place of the logits of the token to come."""
        if self._hidden is None or self._hidden.ndim != 3 or len(self._hidden) != len(scores):
            seen = "none" if self._hidden is None else f"of shape {tuple(self._hidden.shape)}"
            raise BadInput(
                f"scores are of {len(scores)} rows but the hidden states before them are {seen}; expected one row each "
                "from a forward pass of this model just before, not closed"
            )
        logs = self.log_probs(self._hidden[:, -1], scores).to(scores)
        return logs.masked_fill(scores == -torch.inf, -torch.inf)

    def close(self) -> None:
        """Leave the model as it was, and close the database."""
        self._hook.remove()
        self._hidden = None
        self.db.close()

    def _catch(self, head: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        self._hidden = arguments[0].detach()[:, -1:]

    @torch.no_grad()
    def _places(self, texts: Sequence[Text], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Hidden states (m, d), the model's logits (m, v) and what followed (m,), some windows at a time."""
        windows = windows_of(tokens_of(texts, self.tokenizer, self.head), context_of(self.model))
        if not windows:
            raise BadInput("the texts have no token that follows another; give longer ones")
        windows.sort(key=lambda one: len(one.tokens))
        for low in range(0, len(windows), check.integer(size, "batch_size")):
            some = windows[low : low + size]
            hidden, logits = forward(self.model, self.head, [one.tokens for one in some], True)
            states, own = (torch.cat(list(map(predicting, found, some))) for found in (hidden, logits))
            labels = [token for one in some for token in one.tokens[one.first :]]
            yield states, own, torch.tensor(labels, device=hidden.device)

    def __enter__(self) -> KNNLanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
