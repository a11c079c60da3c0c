"""Attention as alignment: a decoder that rewrites dates attends to the characters that it copies (Luong et al. 2015).

    python examples/alignment.py [--plot PICTURE.png] [--quick]

"2024-3-17" becomes "17-3-2024". A GRU reads the date, another writes it reordered, and `softdb.nn.RecurrentAttention`
connects them. No label says which digit to copy, but the true alignment is known, so the weights can be checked.
"""

from __future__ import annotations

import datetime

import torch
from shared import arguments

from softdb.nn import RecurrentAttention
from softdb.plots import attention_heatmap, figure, save

SYMBOLS = " ^-0123456789"  # padding, which also ends an answer; start symbol; characters of dates
LONGEST = len("2024-12-31") + 1  # symbols of the longest date, with one of padding


def origins(date: str) -> list[int]:
    """For each character of the answer (day, month, year, padding) return the index in the date where it stands."""
    n, m = date.index("-"), date.rindex("-")
    places = [*range(m + 1, len(date)), m, *range(n + 1, m), n, *range(n)]
    return places + [LONGEST - 1] * (LONGEST - len(places))


class Rewriter(torch.nn.Module):
    """Encoder, attention and decoder (Luong et al. 2015, section 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(len(SYMBOLS), 24)
        self.encoder = torch.nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.decoder = torch.nn.GRU(24, 48, batch_first=True)
        self.attention = RecurrentAttention(48, 48, score="general")
        self.symbol = torch.nn.Linear(96, len(SYMBOLS))

    def forward(self, read: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores of the next symbols (b, m, symbols), and attention weights (b, m, n)."""
        states, queries = self.encoder(self.embedding(read))[0], self.decoder(self.embedding(written))[0]
        context, weights = self.attention(queries, states, valid_len=(read > 0).sum(1))
        return self.symbol(torch.cat([context, queries], -1)), weights


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train on most of the dates, rewrite the others, and compare the weights with the true alignment."""
    torch.manual_seed(3)
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    days = [datetime.date.fromordinal(700_000 + day) for day in torch.randperm(80_000)[:6000].tolist()]
    dates = [f"{day.year}-{day.month}-{day.day}" for day in days]
    read = torch.tensor([[SYMBOLS.index(symbol) for symbol in date.ljust(LONGEST)] for date in dates])
    origin = torch.tensor([origins(date) for date in dates])
    right = read.gather(1, origin)
    written = torch.cat([torch.full((6000, 1), SYMBOLS.index("^")), right[:, :-1]], 1)  # the answer, one step late
    model = Rewriter()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(220 if quick else 300):
        chosen = torch.randint(5000, (128,))
        loss = torch.nn.functional.cross_entropy(model(read[chosen], written[chosen])[0].mT, right[chosen])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    scores, weights = (tensor.detach() for tensor in model(read[5000:], written[5000:]))
    correct = (scores.argmax(-1) == right[5000:]).all(1).float().mean().item()
    aligned = (weights.argmax(-1) == origin[5000:])[right[5000:] >= SYMBOLS.index("0")].float().mean().item()
    print(f"held-out dates right {correct:.3f}; digits whose largest weight is on the copied digit {aligned:.3f}")
    assert min(correct, aligned) > 0.95
    if picture:
        drawn, (ax,) = figure(height=4.6)
        date, n = dates[5000], len(dates[5000])
        attention_heatmap(ax, weights[0, :n, :n], [date[i] for i in origins(date)[:n]], list(date), vmax=1)
        ax.set(xlabel="character read", ylabel="character written", title=f"A held-out date, {date}, is written anew")
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
