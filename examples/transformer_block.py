"""From a query to a transformer block: attention over the sequence, then a small network, both with residuals.

    python examples/transformer_block.py [--plot PICTURE.png] [--quick]

A block adds heads, residuals, norms and a network of two layers to self-attention (Vaswani et al. 2017, section 3.1).
The task is to write a sequence backwards. Without attention, accuracy stays at chance. With it, each place attends to
its mirror image.
"""

from __future__ import annotations

import torch
from shared import arguments

import softdb
from softdb.nn import SinusoidalPositions
from softdb.plots import attention_heatmap, figure, save

SYMBOLS, LENGTH, DIM, HEADS = 8, 10, 32, 2


class Block(torch.nn.Module):
    """x + attention(norm(x)), then x + network(norm(x))."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends, self.weights = attends, torch.empty(0)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(DIM), torch.nn.LayerNorm(DIM)])
        self.projections = torch.nn.ModuleList([torch.nn.Linear(DIM, DIM) for _ in range(4)])
        self.network = torch.nn.Sequential(torch.nn.Linear(DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (b, n, d)
        """Return the block's output, and keep the attention weights in `weights`, (b, heads, n, n)."""
        if self.attends:
            normed = self.norms[0](x)
            heads = [layer(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in self.projections[:3]]
            attended = softdb.attention(*heads, details=True)
            self.weights = attended.weights.detach()
            x = x + self.projections[3](attended.output.transpose(1, 2).flatten(2))
        return x + self.network(self.norms[1](x))  # type: ignore[no-any-return]


def trained(attends: bool, steps: int) -> tuple[float, torch.Tensor]:
    """Train a block; return its accuracy in the last steps, and the last attention weights."""
    torch.manual_seed(0)
    block, embedding, head = Block(attends), torch.nn.Embedding(SYMBOLS, DIM), torch.nn.Linear(DIM, SYMBOLS)
    positions = SinusoidalPositions(DIM)
    optimiser = torch.optim.Adam(torch.nn.ModuleList([block, embedding, head]).parameters(), lr=0.005)
    right = 0.0
    for step in range(steps):
        symbols = torch.randint(SYMBOLS, (128, LENGTH))
        logits, mirrored = head(block(positions(embedding(symbols)))), symbols.flip(1)  # (b, n, symbols), (b, n)
        loss = torch.nn.functional.cross_entropy(logits.mT, mirrored)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step >= steps - 20:
            right += (logits.argmax(2) == mirrored).float().mean().item() / 20
    return right, block.weights


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train with attention and without, and draw the attention weights."""
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    steps = 150 if quick else 220
    without, _ = trained(attends=False, steps=steps)
    right, weights = trained(attends=True, steps=steps)
    print(f"symbols right: {without:.2f} without attention (chance {1 / SYMBOLS:.2f}), {right:.2f} with it")
    assert without < 0.2 < 0.9 < right
    assert (weights.mean((0, 1)).argmax(1) == torch.arange(LENGTH).flip(0)).all()
    if picture:
        drawn, axes = figure(HEADS, height=3.6)
        for number, ax in enumerate(axes):
            attention_heatmap(ax, weights[:, number].mean(0), vmax=1, colorbar=ax is axes[-1])
            ax.set(title=f"Head {number + 1}, mean over sequences", xlabel="place read", ylabel="place written")
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
