"""A language model with a memory: what it is worth, in its own domain and in another, and what a token costs.

    python benchmarks/knn_language_model.py --out benchmarks/results/knn-language-model.json

The corpus are the 19,988 definitions of WordNet that ship with softdb. A GPT-2 of 0.7 million parameters is trained on
the nouns', from nothing; the memory is of what the model was trained on (same domain), or of verbs, adjectives and
adverbs, which it has never seen (another domain, without training the model). A tenth of each side's definitions is
held out: of that one half learns λ and T, the other is measured. The ways differ in the memory's sum alone.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import provenance, write_json
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from softdb.data import load_wordnet
from softdb.integrations.transformers import KNNLanguageModel

NOUNS, OTHERS = ("noun",), ("verb", "adj", "adv")
LONGEST = 48  # tokens of a definition; a few are cut
LEARNED = 150  # definitions from which λ and T are learned
WAYS: dict[str, dict[str, Any] | None] = {
    "model alone": None,
    "exact": {},
    "rtol=0.2": {"rtol": 0.2},
    "k=1024": {"k": 1024},
    "k=64": {"k": 64},
    "k=8": {"k": 8},
    "exact, gate": {"gate": True},
}


def tokenizer_of(texts: list[str], size: int) -> Any:
    """Pieces of words, learned from texts; each text between a beginning and an end."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.normalizer = normalizers.Lowercase()
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    pieces.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def trained(tokenizer: Any, texts: list[str], epochs: int, width: int, batch: int = 64) -> Any:
    """A small GPT-2, from nothing."""
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes = {"n_positions": LONGEST, "n_embd": width, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **special))
    tokens = [one[:LONGEST] for one in tokenizer(texts)["input_ids"]]
    steps = -(-len(tokens) // batch) * epochs
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, steps)
    for number in range(1, epochs + 1):
        order, total = torch.randperm(len(tokens)).tolist(), 0.0
        order.sort(key=lambda i: len(tokens[i]) + 4 * torch.rand(()).item())  # batches of like lengths
        parts = [order[low : low + batch] for low in range(0, len(order), batch)]
        for i in torch.randperm(len(parts)).tolist():
            mine = [torch.tensor(tokens[j]) for j in parts[i]]
            ids = torch.nn.utils.rnn.pad_sequence(mine, batch_first=True, padding_value=2)
            there = torch.nn.utils.rnn.pad_sequence([torch.ones(len(one)) for one in mine], batch_first=True)
            wanted = ids.masked_fill(there == 0, -100)
            loss = model(input_ids=ids, attention_mask=there.long(), labels=wanted).loss
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            rate.step()
            total += loss.item()
        print(f"epoch {number}, loss {total / len(parts):.3f}", flush=True)
    return model.eval()


def domain(parts: tuple[str, ...]) -> dict[str, list[str]]:
    """The definitions of some parts of speech: to train on or to remember, to learn λ and T from, to measure on."""
    data = load_wordnet()
    found: dict[str, list[str]] = {"train": [], "learn": [], "test": []}
    for name, payload in zip(data.ids, data.payloads, strict=True):
        if payload["pos"] in parts:
            chance = hashlib.sha256(name.encode()).digest()[0]  # by name, so that a split stays what it is
            found["train" if chance >= 26 else "learn" if chance >= 13 else "test"].append(payload["gloss"])
    return found


def cpu_ms(run: Callable[[], object], tokens: int) -> float:
    """Milliseconds of CPU time a token; other work of the machine does not count."""
    run()
    begin = time.process_time()
    run()
    return round((time.process_time() - begin) * 1e3 / tokens, 3)


def measured(
    model: Any,
    tokenizer: Any,
    texts: dict[str, list[str]],
    epochs: int,
    found: dict[str, Any],
    keep: Callable[[], None],
    path: Path | None,
    ask_for: list[str],
) -> None:
    """A line for each way that is not found yet: perplexity of held-out texts, what was learned, what a token costs."""
    ways = found.setdefault("ways", {})
    if set(ask_for) <= set(ways):
        return
    test, few = texts["test"], texts["test"][:64]
    count = sum(len(one) - 1 for one in tokenizer(few)["input_ids"])
    lm = KNNLanguageModel.from_corpus(model, texts["train"], path, tokenizer=tokenizer)
    found["records"] = len(lm.db)
    found["test_tokens"] = sum(len(one) - 1 for one in tokenizer(test)["input_ids"])
    if lm.db.stats().index is None:
        lm.db.build_index("ivf", recall=0.95)
    for name, how in WAYS.items():
        if name in ways or name not in ask_for:
            continue
        one = KNNLanguageModel(model, lm.db, tokenizer=tokenizer, **(how or {}))
        begin = time.process_time()
        if how is not None:
            one.fit(texts["learn"][:LEARNED], epochs=epochs, lr=0.2, batch_size=128)
        learned = round(time.process_time() - begin, 1)
        ask = functools.partial(one.perplexity, memory=how is not None)
        ways[name] = {"perplexity": round(ask(test), 2), "ms_a_token": cpu_ms(functools.partial(ask, few), count)}
        if how is not None:
            share, heat = round(one.mixture.bias.sigmoid().item(), 3), round(one.mixture.temperature, 2)
            ways[name] |= {"interpolation": share, "temperature": heat, "learning_s": learned}
        print(name, ways[name], flush=True)
        keep()
    lm.close()


def main() -> None:
    """Train, remember, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="a folder: the model is kept there, and not trained again")
    parser.add_argument("--memory", type=Path, help="a folder: the databases are kept there, and not made again")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--learning", type=int, default=3, help="epochs of λ and T")
    given = parser.parse_args()
    nouns, others = domain(NOUNS), domain(OTHERS)
    if given.model is not None and given.model.is_dir():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(given.model)
        model = GPT2LMHeadModel.from_pretrained(given.model).eval()
    else:
        tokenizer = tokenizer_of(nouns["train"], given.vocabulary)
        model = trained(tokenizer, nouns["train"], given.epochs, given.width)
        if given.model is not None:
            tokenizer.save_pretrained(given.model)
            model.save_pretrained(given.model)
    found: dict[str, Any] = {}
    if given.out is not None and given.out.is_file():
        found = json.loads(given.out.read_text())  # what was cut short goes on
    found |= provenance(["torch", "transformers", "faiss-cpu"])
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())

    def keep() -> None:
        if given.out is not None:
            write_json(given.out, found)

    for name, texts in (("another domain", others), ("same domain", nouns)):
        part, path = found.setdefault(name, {}), given.memory and given.memory / name.replace(" ", "-")
        measured(model, tokenizer, texts, given.learning, part, keep, path, given.ways)


if __name__ == "__main__":
    main()
