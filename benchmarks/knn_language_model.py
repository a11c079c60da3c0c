"""A language model with a memory: perplexity in its own domain and in another, and CPU time of a token.

    python benchmarks/knn_language_model.py --out benchmarks/results/knn-language-model.json

The corpus is the 19,988 definitions of WordNet that ship with softdb. A GPT-2 with 0.7 million parameters is trained
from scratch on the nouns. The memory holds the training texts of the model ("same domain"), or verbs, adjectives and
adverbs, which the model has never seen ("another domain"). A tenth of the definitions of each domain is held out: one
half of it learns λ and T, the other half is measured. The ways differ only in how they sum over the memory.
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
LONGEST = 48  # tokens of a definition; longer ones are cut
LEARNED = 150  # definitions that λ and T are learned from
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
    """Train a BPE tokenizer on the texts; it puts each text between <s> and </s>."""
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
    """Train a small GPT-2 from scratch."""
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    sizes = {"n_positions": LONGEST, "n_embd": width, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **special))
    tokens = [ids[:LONGEST] for ids in tokenizer(texts)["input_ids"]]
    steps = -(-len(tokens) // batch) * epochs
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, 2e-3, steps)
    for number in range(1, epochs + 1):
        order, total = torch.randperm(len(tokens)).tolist(), 0.0
        order.sort(key=lambda i: len(tokens[i]) + 4 * torch.rand(()).item())  # similar lengths in a batch
        batches = [order[low : low + batch] for low in range(0, len(order), batch)]
        for i in torch.randperm(len(batches)).tolist():
            sequences = [torch.tensor(tokens[j]) for j in batches[i]]
            ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=2)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in sequences], batch_first=True)
            labels = ids.masked_fill(mask == 0, -100)
            loss = model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            rate.step()
            total += loss.item()
        print(f"epoch {number}, loss {total / len(batches):.3f}", flush=True)
    return model.eval()


def domain(parts: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the definitions of these parts of speech: "train" (or remember), "learn" (λ and T) and "test"."""
    data = load_wordnet()
    splits: dict[str, list[str]] = {"train": [], "learn": [], "test": []}
    for name, payload in zip(data.ids, data.payloads, strict=True):
        if payload["pos"] in parts:
            byte = hashlib.sha256(name.encode()).digest()[0]  # by id, so that the split never changes
            splits["train" if byte >= 26 else "learn" if byte >= 13 else "test"].append(payload["gloss"])
    return splits


def cpu_ms(run: Callable[[], object], tokens: int) -> float:
    """Return milliseconds of CPU time per token; other work of the machine does not count."""
    run()
    begin = time.process_time()
    run()
    return round((time.process_time() - begin) * 1e3 / tokens, 3)


def measured(
    model: Any,
    tokenizer: Any,
    texts: dict[str, list[str]],
    epochs: int,
    result: dict[str, Any],
    save: Callable[[], None],
    path: Path | None,
    chosen: list[str],
) -> None:
    """Measure each chosen way that the result lacks: perplexity of held-out texts, λ and T, CPU time per token."""
    ways = result.setdefault("ways", {})
    if set(chosen) <= set(ways):
        return
    test, few = texts["test"], texts["test"][:64]
    count = sum(len(ids) - 1 for ids in tokenizer(few)["input_ids"])
    lm = KNNLanguageModel.from_corpus(model, texts["train"], path, tokenizer=tokenizer)
    result["records"] = len(lm.db)
    result["test_tokens"] = sum(len(ids) - 1 for ids in tokenizer(test)["input_ids"])
    if lm.db.stats().index is None:
        lm.db.build_index("ivf", recall=0.95)
    for name, options in WAYS.items():
        if name in ways or name not in chosen:
            continue
        knn_model = KNNLanguageModel(model, lm.db, tokenizer=tokenizer, **(options or {}))
        begin = time.process_time()
        if options is not None:
            knn_model.fit(texts["learn"][:LEARNED], epochs=epochs, lr=0.2, batch_size=128)
        learning_s = round(time.process_time() - begin, 1)
        ask = functools.partial(knn_model.perplexity, memory=options is not None)
        ways[name] = {"perplexity": round(ask(test), 2), "ms_a_token": cpu_ms(functools.partial(ask, few), count)}
        if options is not None:
            mixture = knn_model.mixture
            share, temperature = round(mixture.bias.sigmoid().item(), 3), round(mixture.temperature, 2)
            ways[name] |= {"interpolation": share, "temperature": temperature, "learning_s": learning_s}
        print(name, ways[name], flush=True)
        save()
    lm.close()


def main() -> None:
    """Train the model, fill the memories, measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help="folder to keep the trained model in, and to read it from")
    parser.add_argument("--memory", type=Path, help="folder to keep the databases in, and to open them from")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--learning", type=int, default=3, help="epochs to learn λ and T")
    args = parser.parse_args()
    nouns, others = domain(NOUNS), domain(OTHERS)
    if args.model is not None and args.model.is_dir():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
        model = GPT2LMHeadModel.from_pretrained(args.model).eval()
    else:
        tokenizer = tokenizer_of(nouns["train"], args.vocabulary)
        model = trained(tokenizer, nouns["train"], args.epochs, args.width)
        if args.model is not None:
            tokenizer.save_pretrained(args.model)
            model.save_pretrained(args.model)
    result: dict[str, Any] = {}
    if args.out is not None and args.out.is_file():
        result = json.loads(args.out.read_text())  # a run that was cut short goes on
    result |= provenance(["torch", "transformers", "faiss-cpu"])
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())

    def save() -> None:
        if args.out is not None:
            write_json(args.out, result)

    for name, texts in (("another domain", others), ("same domain", nouns)):
        row, path = result.setdefault(name, {}), args.memory and args.memory / name.replace(" ", "-")
        measured(model, tokenizer, texts, args.learning, row, save, path, args.ways)


if __name__ == "__main__":
    main()
