"""A translation whose word order differs: "cats do not like dogs" becomes "katzen mögen hunde nicht".

    python examples/translation.py [--plot PICTURE.png] [--quick]

A GRU reads the sentence, another writes. At each step the writer queries the reader's states, by a dot product without
parameters or by an additive score (Bahdanau, Cho and Bengio 2015). "not" is read third and written last; the weights
learn this without a label. Sentences with held-out pairs of nouns are translated correctly.
"""

from __future__ import annotations

import itertools

import torch
from shared import arguments

from softdb.nn import RecurrentAttention
from softdb.plots import attention_heatmap, figure, save

NOUNS = {"cats": "katzen", "dogs": "hunde", "birds": "vögel", "mice": "mäuse", "bears": "bären", "foxes": "füchse"}
VERBS = {"like": "mögen", "see": "sehen", "hear": "hören", "know": "kennen"}


def sentences() -> list[tuple[list[str], list[str]]]:
    """Return plain and negated sentences in English and German."""
    pairs, nouns = [], itertools.permutations(NOUNS.items(), 2)
    for ((a, x), (b, y)), (do, tut) in itertools.product(nouns, VERBS.items()):
        pairs += [([a, do, b, ".", "."], [x, tut, y, "."]), ([a, "do", "not", do, b], [x, tut, y, "nicht"])]
    return pairs


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
        """Return scores of the next words (b, m, words), and attention weights (b, m, n)."""
        states, queries = self.encoder(self.embedding(read))[0], self.decoder(self.embedding(written))[0]
        context, weights = self.attention(queries, states)
        return self.word(torch.cat([context, queries], -1)), weights


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train with both scores, translate the held-out sentences, and draw the attention weights."""
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    pairs = sentences()
    words = sorted({word for pair in pairs for side in pair for word in side})
    read, right = (torch.tensor([[words.index(word) for word in pair[side]] for pair in pairs]) for side in (0, 1))
    written = torch.cat([torch.full((len(pairs), 1), words.index(".")), right[:, :-1]], 1)  # one step late
    test = torch.tensor([{"cats", "dogs"} <= set(pair[0]) for pair in pairs])  # held-out sentences
    shown = pairs.index((["cats", "do", "not", "like", "dogs"], ["katzen", "mögen", "hunde", "nicht"]))
    drawn, axes = figure(2, height=3.5)
    for ax, score in zip(axes, ("dot", "additive"), strict=True):
        torch.manual_seed(0)
        model = Translator(len(words), score)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(100 if quick else 150):
            loss = torch.nn.functional.cross_entropy(model(read[~test], written[~test])[0].mT, right[~test])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        scores, weights = model(read, written)
        correct = (scores.argmax(-1) == right).all(1)[test].float().mean().item()
        print(f"{score:9} held-out right {correct:.2f}; 'nicht' from '{pairs[shown][0][weights[shown, 3].argmax()]}'")
        assert correct > 0.9
        attention_heatmap(ax, weights[shown].detach(), *pairs[shown][::-1], vmax=1, colorbar=ax is axes[-1])
        ax.set(title=f"{score} score", xlabel="word read", ylabel="word written" if ax is axes[0] else "")
    if picture:
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
