"""The phone book of the attention textbooks: one database answers an exact, an approximate and a soft query.

    python examples/phone_book.py [--plot PICTURE.png] [--quick]

The keys are last names, as vectors of character n-grams. The values are first names, as class labels, so a soft query
returns a distribution over first names. With rising temperature it changes from a database lookup to average pooling.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from shared import arguments

import softdb
from softdb.plots import figure, save, temperature_sweep, weight_bars
from softdb.text import HashedNGrams

BOOK = [
    ("Schumacher", "Anna"), ("Schneider", "Michael"), ("Fischer", "Julia"),
    ("Weber", "Sarah"), ("Schulz", "Lisa"), ("Schuler", "Tim"),
]  # fmt: skip
LAST, FIRST = (list(names) for names in zip(*BOOK, strict=True))


def approximate(db: softdb.SoftDB) -> None:
    """Delete a record, and find the nearest one instead."""
    db.delete(["Schulz"])
    try:
        db["Schulz"]
    except softdb.UnknownId as error:
        print(f"without it   {error}")
    hits = db.search("Schulz", k=1)
    print(f"approximate  {hits.ids[0][0]} -> {hits.payloads[0][0]['first']}")


def soft(db: softdb.SoftDB, temperatures: list[float]) -> torch.Tensor:
    """Return the distribution over first names for "Schulz" at each temperature, (t, 6)."""
    shares = torch.cat([db.attend("Schulz", temperature=temperature).output for temperature in temperatures])
    assert shares[0, LAST.index("Schulz")] > 0.99  # a lookup
    assert shares[-1].max() < 0.2  # pooling: almost a sixth each
    print("\nsoft         temperature  " + "".join(f"{first:>9}" for first in FIRST))
    for temperature, row in list(zip(temperatures, shares.tolist(), strict=True))[::10]:
        print(f"             {temperature:11.3f}  " + "".join(f"{share:9.3f}" for share in row))
    return shares


def draw(temperatures: list[float], shares: torch.Tensor, path: str) -> None:
    """Draw the weights over temperature as curves, and those of every tenth temperature as bars."""
    picture, (left, right) = figure(2, height=3.6)
    labels = [", ".join(names) for names in BOOK]
    temperature_sweep(left, temperatures, shares, labels)
    left.set_title('The weight of each record for "Schulz"')
    weight_bars(right, shares[::10], labels, [f"{temperature:.2g}" for temperature in temperatures[::10]])
    right.set(title="lookup → attention → average pooling", xlabel="temperature")
    right.tick_params(axis="x", labelsize=8)
    save(picture, path)
    print(f"\npicture      {path}")


def main(picture: str | None) -> None:
    """Fill a phone book, query it in three ways, and draw the soft query."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "phone-book"
        with softdb.open(path, encoder=HashedNGrams(), num_classes=len(BOOK), metric="cosine") as db:
            entries = [{"first": first} for first in FIRST]
            db.insert(LAST, LAST, values=range(len(BOOK)), payloads=entries)  # the last name is id and key
            print(f"exact        Schulz -> {db['Schulz'].payload['first']}")
            approximate(db)
            db.insert(["Schulz"], ["Schulz"], values=[LAST.index("Schulz")], payloads=[{"first": "Lisa"}])
            temperatures = torch.logspace(-2, 1.5, 71).tolist()
            shares = soft(db, temperatures)
    if picture:
        draw(temperatures, shares, picture)


if __name__ == "__main__":
    main(arguments(__doc__)["picture"])
