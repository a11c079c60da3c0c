"""A language model with a database as its memory, instead of more training.

    python examples/language_model.py [DEFINITIONS] [--plot PICTURE.png] [--quick]

A small GPT-2 is trained on definitions of nouns from scratch, in a minute or two. Definitions of verbs and adjectives
go into a database, one record per token: the key is the model's hidden state before the token, the value is the token.
The next token's probabilities are a mixture of the model's and the database's. The share and the temperature of the
database are learned from some more definitions, and the others are held out.
"""

from __future__ import annotations

import torch
from shared import arguments, bars
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

from softdb.data import load_wordnet
from softdb.integrations.transformers import KNNLanguageModel

LONGEST, BATCH = 40, 64


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer trained on the texts."""
    pieces = Tokenizer(models.BPE(unk_token="<unk>"))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    pieces.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False))
    ends = [("<s>", 1), ("</s>", 2)]
    pieces.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def trained(tokenizer: PreTrainedTokenizerFast, texts: list[str], epochs: int = 2) -> GPT2LMHeadModel:
    """Return a language model trained on the texts from scratch."""
    torch.manual_seed(0)
    sizes = {"n_positions": LONGEST, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=2))
    tokens = sorted((torch.tensor(ids[:LONGEST]) for ids in tokenizer(texts)["input_ids"]), key=len)
    batches = [tokens[low : low + BATCH] for low in range(0, len(tokens), BATCH)]
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for i in torch.randperm(len(batches)).tolist():
            labels = torch.nn.utils.rnn.pad_sequence(batches[i], batch_first=True, padding_value=-100)
            logits = model(labels.clamp(min=0)).logits  # the loss ignores labels of -100
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
        print(f"epoch {epoch + 1}    loss of the last batch {loss.item():.2f}", flush=True)
    return model


def main(most: int, picture: str | None, quick: bool) -> None:
    """Train on nouns, store the others, and compare perplexities."""
    logging.set_verbosity_error()
    most = min(most, 3000) if quick else most
    payloads = load_wordnet().payloads
    nouns = [payload["gloss"] for payload in payloads if payload["pos"] == "noun"][:most]
    others = [payload["gloss"] for payload in payloads if payload["pos"] != "noun"][::-1][:most]
    tokenizer = tokenizer_of(nouns)
    model = trained(tokenizer, nouns)
    test, learn, stored = others[::20], others[10::20], [gloss for i, gloss in enumerate(others) if i % 10]
    with KNNLanguageModel.from_corpus(model, stored, tokenizer=tokenizer) as lm:
        print(f"{len(lm.db):,} tokens stored")
        lm.fit(learn, epochs=2)
        share, temperature = lm.mixture.bias.sigmoid().item(), lm.mixture.temperature
        print(f"learned: the memory's share {share:.2f}, its temperature {temperature:.1f}")
        without, with_memory = lm.perplexity(test, memory=False), lm.perplexity(test)
        print(f"perplexity without the memory {without:.1f}, with it {with_memory:.1f}")
        assert with_memory < without
        print("written with it:", lm.generate("to", max_new_tokens=12, num_beams=3))
    if picture:
        bars(picture, {"": {"alone": without, "with memory": with_memory}}, "Definitions held out", "perplexity")


if __name__ == "__main__":
    main(**arguments(__doc__, most={"nargs": "?", "type": int, "default": 20_000, "metavar": "DEFINITIONS"}))
