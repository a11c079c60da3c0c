"""Self-attention is a query of the sequence's own database: every token asks all tokens of its sequence.

    python examples/self_attention.py [PICTURE.png]

Without positions it cannot tell an order: shuffle the tokens, and the answers are shuffled alike (it is equivariant;
Vaswani et al. 2017, section 3.5; Dive into Deep Learning, 11.6). With sines and cosines added, the same words in
another order are answered otherwise.
"""

from __future__ import annotations

import sys

import torch

import softdb
from softdb.nn import SinusoidalPositions
from softdb.plots import attention_heatmap, figure, save

WORDS = ["dogs", "chase", "cats", "and", "cats", "chase", "mice"]
DIM = 16


def ask_itself(tokens: torch.Tensor) -> softdb.Pooled:
    """Every token asks a database of all tokens; keys are values."""
    with softdb.open(None, dim=DIM) as db:
        db.insert(range(len(tokens)), tokens)
        return db.attend(tokens, score=softdb.scores.ScaledDot(), need_weights=True)


def main(picture: str | None) -> None:
    """Ask in order and shuffled, without positions and with them."""
    torch.manual_seed(0)
    table = dict.fromkeys(WORDS, torch.empty(0))
    table = {word: 1.5 * torch.randn(DIM) for word in table}
    tokens = torch.stack([table[word] for word in WORDS])
    order = torch.randperm(len(WORDS))
    positions = SinusoidalPositions(DIM)

    plain, shuffled = ask_itself(tokens), ask_itself(tokens[order])
    placed, moved = ask_itself(positions(tokens)), ask_itself(positions(tokens[order]))
    reference = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
    assert torch.allclose(plain.output, reference, atol=1e-5)
    alike = (shuffled.output - plain.output[order]).abs().max().item()
    unlike = (moved.output - placed.output[order]).abs().max().item()
    print(f"shuffled tokens, shuffled answers: off by {alike:.1e} without positions, by {unlike:.1f} with them")
    assert alike < 1e-5
    assert unlike > 0.1
    twice = [place for place, word in enumerate(WORDS) if word == "cats"]
    assert torch.allclose(plain.output[twice[0]], plain.output[twice[1]], atol=1e-5)  # one word, one answer
    assert not torch.allclose(placed.output[twice[0]], placed.output[twice[1]], atol=0.01)  # a word at a place
    if picture:
        drawn, (left, right) = figure(2, 5.5, 4.5)
        for ax, answer, name in ((left, plain, "without positions"), (right, placed, "with sines and cosines")):
            attention_heatmap(ax, answer.weights, WORDS, WORDS)
            ax.set(title=name, xlabel="is asked", ylabel="asks")
        save(drawn, picture)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
