"""The kNN-LM: a causal model, a database of its hidden states, and the mixture of their predictions."""

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

QUERIES = 512  # number of hidden states in one soft query
MAX_LR = 10.0  # Adam changes log T and the logit of λ by about lr in a step


class Mixture(torch.nn.Module):
    """Learned parameters of a language model with a memory: the temperature T, and λ, a number or a gate λ(h).

        λ = σ(b),   or with a gate   λ(h) = σ(b + w·x),  x = (h, log Σ_i exp(-‖h - k_i‖² / T)) standardised

    The second component of x measures how near the memory's records are (as in He et al. 2021, section 3.1). T is the
    square of the bandwidth of `score`. A gate starts at w = 0. `state_dict()` holds all parameters.
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
        """The temperature T."""
        return float(self.score.bandwidth.detach()) ** 2

    def logits(self, hidden: Tensor, lse: Tensor) -> Tensor:  # (q, d), (q,) -> (q, 1)
        """Return log(λ / (1 - λ)) for each hidden state."""
        if self.gate is None:
            return self.bias.expand(len(hidden), 1)
        inputs = torch.cat([hidden, lse.unsqueeze(1)], 1).nan_to_num(neginf=0.0)
        logits: Tensor = self.bias + self.gate((inputs - self.mean) / self.deviation)
        return logits

    @torch.no_grad()
    def standardise(self, hidden: Tensor, lse: Tensor) -> None:  # (m, d), (m,)
        """Set the mean and deviation that standardise the gate's inputs."""
        inputs = torch.cat([hidden, lse.unsqueeze(1)], 1)
        self.mean, self.deviation = inputs.mean(0), inputs.std(0).clamp(min=1e-6)

    def mixed(self, memory: Tensor, model: Tensor, logits: Tensor) -> Tensor:  # (q, v), (q, v), (q, 1) -> (q, v)
        """Return log p from log p_memory, log p_model and the logits of λ."""
        log = torch.nn.functional.logsigmoid
        return torch.logaddexp(log(logits) + memory, log(-logits) + model)


class KNNLanguageModel(LogitsProcessor):
    """A causal language model, and a database of its hidden states with the tokens that followed them.

    It is a `LogitsProcessor`: after a forward pass of the model it replaces the logits of each row's last token by
    log p. So `generate` works with batches, left padding, a cache and beams. Until `close()` a hook on the output head
    records its inputs, the hidden states. Tokens that an earlier processor forbade stay forbidden.

    Cost per token: the model's and the soft query's, which is n d over every record, or a search with `k=`.

    Args:
        model: a causal model with an output head, such as AutoModelForCausalLM loads; it is not trained.
        db: a database as `from_corpus` creates: its keys are as wide as the head's input, its classes are the tokens.
        tokenizer: the model's tokenizer; without it texts are lists of token ids.
        k: sum over the k nearest records, as the paper does; rtol: estimate the sum over all records to a tolerance,
            which is cheaper with an index; neither: sum over all records exactly.
        interpolation: initial λ, between 0 and 1.
        temperature: initial T; None: the median squared distance of a sample of records to their 8th nearest other
            record.
        gate: learn λ(h) in place of a constant λ.

    Raises BadInput for a model without a head or with an encoder, for another width or vocabulary than the database's,
    and for a database without records or of another model's hidden states.

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

        Each token but a text's first is a record: its key is the hidden state before the token, its value the token.
        A text longer than the model's context, or than 1,024 tokens, is split into windows that overlap by half. A
        commit holds texts of some 16,384 tokens, so an interrupted call resumes if it is repeated with the same texts.

        Args:
            texts: m texts, or, without a tokenizer, m lists of token ids.
            path: the database's directory; None: in memory.
            dtype: dtype of the stored keys.
            batch_size: number of windows that pass through the model together.
            progress: called with the name of the step, the number of texts done, and the number of all texts.
            settings: further arguments of the class.

        Cost: a pass of the corpus through the model, without its head. Raises BadInput for a corpus without a token to
        predict, and for a database at `path` that was begun with other texts.
        """
        head = head_of(model, tokenizer)
        encoder = HiddenStates(model, tokenizer, head)
        tokens = tokens_of(texts, tokenizer, head)
        lengths = [max(0, len(token) - 1) for token in tokens]
        if not sum(lengths):
            raise BadInput(f"the corpus of {len(tokens)} texts has no token that follows another; give longer texts")
        size, (classes, dim) = check.integer(batch_size, "batch_size"), head.weight.shape
        db = softdb.open(path, dim=dim, num_classes=classes, metric="l2", dtype=dtype, encoder=encoder)
        with contextlib.ExitStack() as opened:
            opened.callback(db.close)
            for low, high in unstored(db, tokens, lengths):
                start = sum(lengths[:low])
                keys, labels = records_of(model, head, tokens[low:high], size)
                db.insert(range(start, start + len(keys)), keys, labels)
                if progress is not None:
                    progress("embed", high, len(tokens))
            language_model = cls(model, db, tokenizer=tokenizer, **settings)
            opened.pop_all()
        return language_model

    @torch.no_grad()
    def log_probs(self, hidden: Tensor, logits: Tensor | None = None) -> Tensor:  # (q, d), (q, v) -> (q, v)
        """Return log p of every token, given hidden states and the model's logits; without logits log p_memory."""
        blocks = []
        for low in range(0, len(hidden), QUERIES):
            states = hidden[low : low + QUERIES].float()
            answer = self._attend(states, self.mixture, None)
            logs = answer.output.log()
            if logits is not None:
                own = logits[low : low + QUERIES].float().log_softmax(1).to(logs.device)
                logs = self.mixture.mixed(logs, own, self.mixture.logits(states, answer.lse).to(logs.device))
            blocks.append(logs)
        return torch.cat(blocks)

    def perplexity(self, texts: Sequence[Text], *, memory: bool = True, batch_size: int = 8) -> float:
        """Return exp of the mean -log p over all tokens but each text's first; with `memory=False` p is p_model.

        Raises BadInput for texts without a token to predict.
        """
        total, count = 0.0, 0
        for hidden, logits, labels in self._batches(texts, batch_size):
            logs = self.log_probs(hidden, logits) if memory else logits.float().log_softmax(1)
            total -= float(logs.gather(1, labels.to(logs.device).unsqueeze(1)).double().sum())
            count += len(labels)
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
        """Learn λ, or its gate, and T from texts that are not in the database; return the perplexity of each epoch.

            loss = mean over tokens of -log(λ p_memory(y | h) + (1 - λ) p_model(y | h)),  by Adam

        The gradient to T goes through the soft query: exact, over the k nearest, or drawn, as the class was set up.
        Texts that are in the database would have distance 0 to its records, and teach λ = 1. The model does not change.

        Args:
            texts: some thousand tokens are enough; memory holds their hidden states, d numbers each.
            epochs, lr: of Adam; a gate is trained at a tenth of the rate.
            batch_size: number of tokens in a step.
            seed: seed of the order of the tokens and of the draws of `rtol`.
            progress: called with the name of the epoch, the number of steps done, and the number of all steps.

        Cost per step: a soft query of the batch, forward and backward. Raises BadInput for invalid settings, and if the
        loss becomes NaN or infinite: the mixture is then unchanged.
        """
        epochs, size = check.integer(epochs, "epochs"), check.integer(batch_size, "batch_size")
        rate = check.positive(lr, "lr")
        if rate > MAX_LR:
            raise BadInput(f"lr is {rate:g}; expected at most {MAX_LR:g}, such as 0.1")
        draws = torch.Generator().manual_seed(check.integer(seed, "seed", 0, 2**63 - 1))
        with torch.inference_mode(False):
            batches = [
                (hidden.float(), logits.float().log_softmax(1).gather(1, targets.unsqueeze(1)), targets)
                for hidden, logits, targets in self._batches(texts, 8)
            ]
            states, own, labels = (torch.cat(column) for column in zip(*batches, strict=True))
            mixture = copy.deepcopy(self.mixture).requires_grad_(True)
            if mixture.gate is not None:
                sample = states[torch.randperm(len(states), generator=draws)[: 2 * QUERIES]]
                mixture.standardise(sample, self._attend(sample, mixture, None).lse)
            gate = [] if mixture.gate is None else list(mixture.gate.parameters())
            others = [parameter for parameter in mixture.parameters() if not any(parameter is each for each in gate)]
            adam = torch.optim.Adam([{"params": others, "lr": rate}, {"params": gate, "lr": rate / 10}])
            perplexities, steps = [], -(-len(states) // size)
            for epoch in range(epochs):
                total = 0.0
                for step, batch in enumerate(torch.randperm(len(states), generator=draws).split(size), 1):  # type: ignore[no-untyped-call]
                    loss = self._loss(mixture, states[batch], own[batch], labels[batch], draws)
                    adam.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    adam.step()
                    total += float(loss.detach()) * len(batch)
                    finite = all(bool(parameter.isfinite().all()) for parameter in mixture.parameters())
                    if not (math.isfinite(total) and finite):
                        raise BadInput(f"the loss became {total:g} in epoch {epoch + 1}; lower lr, which is {rate:g}")
                    if progress is not None:
                        progress(f"epoch {epoch + 1}", epoch * steps + step, epochs * steps)
                perplexities.append(math.exp(total / len(states)))
            self.mixture = mixture.requires_grad_(False)
        return perplexities

    @torch.enable_grad()
    def _loss(self, mixture: Mixture, hidden: Tensor, own: Tensor, labels: Tensor, draws: torch.Generator) -> Tensor:
        """Return the mean -log p of the labels, given their log p_model `own` (q, 1)."""
        answer = self._attend(hidden, mixture, draws)
        weights = answer.output.gather(1, labels.unsqueeze(1))
        memory = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()  # gradient 0 for a label without weight
        return -mixture.mixed(memory, own, mixture.logits(hidden, answer.lse)).mean()

    def _attend(self, hidden: Tensor, mixture: Mixture, draws: torch.Generator | None) -> Pooled:
        draws = draws if self.rtol is not None else None
        return self.db.attend(hidden, score=mixture.score, k=self.k, rtol=self.rtol, generator=draws)

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """Run `model.generate` with the memory. Texts return texts (with a tokenizer), token ids return token ids.

        Args:
            inputs: a text, or several; token ids, a tensor (q, t) or q lists, which are padded left; or None, with the
                inputs in `kwargs`.
            kwargs: arguments of `model.generate`. A `logits_processor` of yours runs before the memory.

        Raises BadInput for assisted generation, which predicts several tokens at once, and for other inputs.
        """
        assisted = [name for name in ("assistant_model", "prompt_lookup_num_tokens") if kwargs.get(name) is not None]
        if assisted:
            raise BadInput(f"{assisted[0]} is given, but a memory answers for one token at a time; leave it out")
        kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or ()), self]
        if inputs is None or isinstance(inputs, Tensor):
            return self.model.generate(inputs, **kwargs)
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str | list) for text in texts):
            raise BadInput(f"inputs are {check.shown(inputs)}; expected a text, texts, or token ids (q, t)")
        as_text = isinstance(texts[0], str)
        if as_text and self.tokenizer is None:
            raise BadInput("texts are given without a tokenizer; give token ids, or tokenizer= to the class")
        prompts = prompts_of(texts, self.tokenizer, self.head) if as_text else tokens_of(texts, None, self.head)
        outputs = self.model.generate(**kwargs, **padded(prompts, self.model.device, left=True))
        if as_text:
            outputs = self.tokenizer.batch_decode(outputs, skip_special_tokens=True)
        return outputs[0] if isinstance(inputs, str) else outputs

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (q, t), (q, v) -> (q, v)
        """Replace the logits of the next token by log p; transformers calls this in `generate`."""
        if self._hidden is None or self._hidden.ndim != 3 or len(self._hidden) != len(scores):
            states = "none" if self._hidden is None else f"of shape {tuple(self._hidden.shape)}"
            raise BadInput(
                f"scores have {len(scores)} rows but the hidden states of the last forward pass are {states}; call "
                "generate with this model, before close()"
            )
        logs = self.log_probs(self._hidden[:, -1], scores).to(scores)
        return logs.masked_fill(scores == -torch.inf, -torch.inf)

    def close(self) -> None:
        """Remove the hook from the model, and close the database."""
        self._hook.remove()
        self._hidden = None
        self.db.close()

    def _catch(self, head: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        self._hidden = arguments[0].detach()[:, -1:]

    @torch.no_grad()
    def _batches(self, texts: Sequence[Text], size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield hidden states (m, d), the model's logits (m, v) and the next tokens (m,), `size` windows at a time."""
        windows = windows_of(tokens_of(texts, self.tokenizer, self.head), context_of(self.model))
        if not windows:
            raise BadInput("the texts have no token that follows another; give longer ones")
        windows.sort(key=lambda window: len(window.tokens))
        for low in range(0, len(windows), check.integer(size, "batch_size")):
            batch = windows[low : low + size]
            outputs = forward(self.model, self.head, [window.tokens for window in batch], True)
            states, logits = (torch.cat(list(map(predicting, output, batch))) for output in outputs)
            labels = [token for window in batch for token in window.tokens[window.first :]]
            yield states, logits, torch.tensor(labels, device=states.device)

    def __enter__(self) -> KNNLanguageModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
