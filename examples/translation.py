"""A translation whose word order differs: "cats do not like dogs" becomes "katzen mögen hunde nicht".

    python examples/translation.py [PICTURE.png]

A GRU reads the sentence, another writes; at each step the writer asks the reader's states by a dot product, which
trains nothing, or by the additive score of Bahdanau, Cho and Bengio (2015). "not" comes third and is written last:
nobody says so, the weights find it. Sentences of held-out pairs of nouns come out right.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch.nn import functional as F

from softdb.nn import RecurrentAttention
from softdb.plots import attention_heatmap, figure, save

NOUNS = {"cats": "katzen", "dogs": "hunde", "birds": "vögel", "mice": "mäuse", "bears": "bären", "foxes": "füchse"}
VERBS = {"like": "mögen", "see": "sehen", "hear": "hören", "know": "kennen"}


def sentences() -> list[tuple[list[str], list[str]]]:
    """Plain and negated ones."""
    found = []
    for (a, x), (verb, tut), (b, y) in itertools.product(NOUNS.items(), VERBS.items(), NOUNS.items()):
        if a != b:
            found.append(([a, verb, b, ".", "."], [x, tut, y, "."]))
            found.append(([a, "do", "not", verb, b], [x, tut, y, "nicht"]))
    return found


class Translator(torch.nn.Module):
    """Encoder, attention and decoder (Luong et al. 2015, section 3)."""

    def __init__(self, words: int, score: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, 16)
        self.encoder = torch.nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.decoder = torch.nn.GRU(16, 32, batch_first=True)
        self.attention = RecurrentAttention(32, 32, score=score)
        self.word = torch.nn.Linear(64, words)

    def forward(self, read: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the next words (b, m, words), and where the writer looked (b, m, n)."""
        states, _ = self.encoder(self.embedding(read))
        queries, _ = self.decoder(self.embedding(written))
        context, weights = self.attention(queries, states)
        return self.word(torch.cat([context, queries], -1)), weights


def main(picture: str | None) -> None:
    """Train with both scores, translate what was held out, and draw where the writer looked."""
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    pairs = sentences()
    words = sorted({word for pair in pairs for side in pair for word in side})
    read, right = (torch.tensor([[words.index(word) for word in pair[side]] for pair in pairs]) for side in (0, 1))
    written = F.pad(right[:, :-1], (1, 0), value=words.index("."))
    held = torch.tensor([{"cats", "dogs"} <= set(pair[0]) for pair in pairs])
    shown, looked = pairs.index((["cats", "do", "not", "like", "dogs"], ["katzen", "mögen", "hunde", "nicht"])), {}
    for score in ("dot", "additive"):
        torch.manual_seed(0)
        model = Translator(len(words), score)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(150):
            loss = F.cross_entropy(model(read[~held], written[~held])[0].flatten(0, 1), right[~held].flatten())
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        scores, weights = model(read, written)
        whole = (scores.argmax(-1) == right).all(1)[held].float().mean().item()
        looked[score] = weights[shown].detach()
        seen = pairs[shown][0][int(looked[score][3].argmax())]
        print(f"{score:9} held-out sentences right {whole:.2f}; 'nicht' looks at '{seen}'")
        assert whole > 0.9
    if picture:
        drawn, axes = figure(2, 5, 4)
        for ax, (score, weights) in zip(axes, looked.items(), strict=True):
            attention_heatmap(ax, weights, pairs[shown][1], pairs[shown][0])
            ax.set(title=score, xlabel="read", ylabel="written")
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
