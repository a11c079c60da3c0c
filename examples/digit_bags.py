"""Multiple-instance learning: is there a 9 in this bag of digits, and which one is it? (Ilse et al. 2018, section 4.2)

    python examples/digit_bags.py [--plot PICTURE.png] [--quick]

A bag is ten of scikit-learn's 8 × 8 digits with one label: does it hold a 9? No label says which digit is the 9.
Attention pools a bag's digits into one vector, and is compared with their mean and their maximum. On bags of new digits
attention is about as good as the maximum and better than the mean. Only attention names the 9, by its largest weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from shared import arguments
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from softdb.nn import MILPooling
from softdb.plots import COLORS, figure, save

SIZE = 10
Pooling = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # bags (b, n, w) -> vectors and weights


def bags(nine: torch.Tensor, count: int) -> torch.Tensor:
    """Return the digits of each bag, (count, SIZE), with a 9 at a random place in the first half of the bags only."""
    nines, others = nine.argwhere()[:, 0], (~nine).argwhere()[:, 0]
    chosen, half = others[torch.randint(len(others), (count, SIZE))], torch.arange(count // 2)
    chosen[half, torch.randint(SIZE, half.shape)] = nines[torch.randint(len(nines), half.shape)]
    return chosen


def main(picture: str | None = None, quick: bool = False) -> None:
    """Train with each pooling, compare them on bags of other digits, and draw the weights of digits."""
    torch.manual_seed(7)
    torch.set_num_threads(1)  # steps are small: threads would wait for each other
    data, order = load_digits(), torch.randperm(1797)
    images, nine = torch.tensor(data.data).float()[order] / 16, torch.tensor(data.target)[order] == 9
    train, test = bags(nine[:900], 600), bags(nine[900:], 500) + 900
    attention, even = MILPooling(32, hidden=64), torch.full((1, SIZE), 1 / SIZE)
    poolings: dict[str, Pooling] = {"mean": lambda x: (x.mean(1), even), "maximum": lambda x: (x.amax(1), even)}
    auc = {}
    poolings["attention"] = attention
    for name, pooling in poolings.items():
        embed = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU())
        odds = torch.nn.Linear(32, 1)
        layers = torch.nn.ModuleList([embed, odds, attention])
        optimiser = torch.optim.Adam(layers.parameters(), lr=2e-3, weight_decay=1e-4)
        for _ in range(250 if quick else 400):
            chosen = train[torch.randint(len(train), (32,))]
            pooled, _ = pooling(embed(images[chosen]))
            loss = F.binary_cross_entropy_with_logits(odds(pooled)[:, 0], nine[chosen].any(1).float())
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        pooled, weights = (tensor.detach() for tensor in pooling(embed(images[test])))
        auc[name] = roc_auc_score(nine[test].any(1), odds(pooled).detach())
        print(f"{name:10} AUC {auc[name]:.3f}")
    hits = nine[test].gather(1, weights.argmax(1, keepdim=True))[:250].float().mean().item()
    print(f"attention's largest weight is on the 9 in {hits:.2f} of the bags with a 9, by chance in {1 / SIZE:.2f}")
    assert auc["attention"] > max(0.95, auc["mean"] + 0.03)
    assert hits > 0.85
    if picture:
        drawn, axes = figure(SIZE, 5, 4.4)
        drawn.suptitle("Each row is a bag with one 9. Above each digit, and in orange: its attention weight")
        for digit, weight, ax in zip(test[:5].flatten(), weights[:5].flatten().tolist(), axes, strict=True):
            tile = images[digit].reshape(8, 8).numpy()
            ax.imshow(0 * tile, cmap="gray", alpha=tile)
            ax.set(xticks=[], yticks=[], facecolor=(COLORS[1], weight))
            ax.set_title(f"{weight:.2f}", loc="center", fontsize=9)
        save(drawn, picture)


if __name__ == "__main__":
    main(**arguments(__doc__))
