"""Self-attention as a query: every token of a sequence queries a database of the sequence's tokens.

    python examples/self_attention.py [--plot PICTURE.png] [--quick]

Without positions, self-attention ignores order: if the tokens are shuffled, the answers are shuffled alike (it is
equivariant; Vaswani et al. 2017, section 3.5; Dive into Deep Learning, 11.6). With sinusoidal positions added, another
order gives other answers.
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb.nn import SinusoidalPositions
from softdb.plots import attention_heatmap, figure, save

WORDS = ["dogs", "chase", "cats", "and", "cats", "chase", "mice"]
DIM = 16


def attend_itself(tokens: torch.Tensor) -> softdb.Pooled:
    """Query a database of all tokens with every token; keys are values."""
    with softdb.open(None, dim=DIM) as db:
        db.insert(range(len(tokens)), tokens)
        return db.attend(tokens, score=softdb.scores.ScaledDot(), need_weights=True)


def main(picture: str | None) -> None:
    """Compare answers in order and shuffled, without positions and with them."""
    torch.manual_seed(0)
    table = dict.fromkeys(WORDS, torch.empty(0))
    table = {word: 1.5 * torch.randn(DIM) for word in table}
    tokens = torch.stack([table[word] for word in WORDS])
    order = torch.randperm(len(WORDS))
    positions = SinusoidalPositions(DIM)

    plain, shuffled = attend_itself(tokens), attend_itself(tokens[order])
    placed, moved = attend_itself(positions(tokens)), attend_itself(positions(tokens[order]))
    reference = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
    assert torch.allclose(plain.output, reference, atol=1e-5)
    without = (shuffled.output - plain.output[order]).abs().max().item()
    with_them = (moved.output - placed.output[order]).abs().max().item()
    print(f"answers of shuffled tokens differ by {without:.1e} without positions, by {with_them:.1f} with them")
    assert without < 1e-5
    assert with_them > 0.1
    first, second = [place for place, word in enumerate(WORDS) if word == "cats"]
    assert torch.allclose(plain.output[first], plain.output[second], atol=1e-5)  # the same word, the same answer
    assert not torch.allclose(placed.output[first], placed.output[second], atol=0.01)  # position changes it
    if picture:
        drawn, (left, right) = figure(2, height=3.6)
        for ax, answer, name in ((left, plain, "Without positions"), (right, placed, "With positions")):
            attention_heatmap(ax, answer.weights, WORDS, WORDS, vmax=1, colorbar=ax is right)
            ax.set(title=name, xlabel="token as record (key)", ylabel="token as query" if ax is left else "")
        save(drawn, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
