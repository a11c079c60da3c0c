"""Make the data of `softdb demo` from WordNet 3.0: glosses as records, dictionary words as queries.

    python benchmarks/make_demo_data.py --dict /usr/share/wordnet [--model DIR_OR_NAME] [--out DIR]

`--dict` is a folder with WordNet's data.*, index.* and cntlist.rev (Debian: the package wordnet-base). The script needs
sentence-transformers. It prints the recall that the reduction to 96 numbers costs and the recall that training gains.
"""

import argparse
import gzip
import hashlib
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POS = ("noun", "verb", "adj", "adv")
SENSE_POS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}  # 5 = satellite adjective

N_RECORDS = 20_000
N_TRAIN, N_HELD_OUT = 8_000, 2_000
WIDTH = 96  # 20,000 x 96 bytes stays under 2 MB
# how WordNet's glosses mark offensive words
OFFENSIVE = re.compile(
    r"(\((ethnic slur|slang)\) )?(extremely )?(offensive|obscene|disparaging) (and derogatory )?(term|name|word)"
)
COMMON_WORD = 10  # credit of a word that is one token of the encoder's vocabulary


@dataclass
class Synset:
    """A meaning: the words that share it, and its gloss."""

    id: str
    pos: str
    lemmas: list[str]
    gloss: str
    examples: list[str]
    is_instance: bool  # a person, place or event with a name of its own
    tagged: int = 0  # count in WordNet's sense-tagged text
    first_sense_of: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Query:
    """A dictionary word and the records that define it."""

    word: str
    answers: list[int]  # positions of records
    held_out: bool


def read_synsets(folder: Path) -> list[Synset]:
    """Return all of WordNet's synsets, with their counts in tagged text and the words whose first sense they are."""
    synsets: dict[str, Synset] = {}
    for pos in POS:
        for line in database_lines(folder / f"data.{pos}"):
            synset = parse_synset(line, pos)
            synsets[synset.id] = synset
    tags: Counter[tuple[str, str, int]] = Counter()
    for line in (folder / "cntlist.rev").read_text("ascii").splitlines():
        sense_key, sense_number, count = line.split()
        lemma, sense = sense_key.split("%")
        tags[SENSE_POS[sense[0]], lemma, int(sense_number)] += int(count)
    for pos in POS:
        for line in database_lines(folder / f"index.{pos}"):
            parts = line.split()
            lemma, n_senses = parts[0], int(parts[2])
            for number, offset in enumerate(parts[-n_senses:], start=1):
                synset = synsets[f"{pos}.{offset}"]
                synset.tagged += tags[pos, lemma, number]
                if number == 1:
                    synset.first_sense_of.append(lemma.replace("_", " "))
    return list(synsets.values())


def database_lines(path: Path) -> list[str]:
    """Return the lines of a WordNet file without the licence, whose lines begin with two spaces."""
    return [line for line in path.read_text("ascii").splitlines() if not line.startswith("  ")]


def parse_synset(line: str, pos: str) -> Synset:
    """Parse a line of data.*, and separate the gloss from the quoted examples."""
    head, _, text = line.partition(" | ")
    parts = head.split()
    n_lemmas = int(parts[3], 16)
    # an adjective may have its syntactic position: "galore(ip)"
    lemmas = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in parts[4 : 4 + 2 * n_lemmas : 2]]
    gloss, *quoted = re.split(r'[;:]\s*"', text.strip(), maxsplit=1)
    examples = re.findall(r'"([^"]+)"', '"' + quoted[0]) if quoted else []
    return Synset(f"{pos}.{parts[0]}", pos, lemmas, gloss.rstrip("; "), examples, "@i" in parts)


def choose_records(synsets: list[Synset], vocabulary: set[str]) -> list[Synset]:
    """Return the synsets of everyday words, in the order of their ids.

    The score of a synset is its count in tagged text. That text is small (it has no giraffe), so the first sense of a
    word also gets the word's count in WordNet's own glosses and examples, and COMMON_WORD if the word is one token of
    the encoder's vocabulary, which was built from a large text. Ties: nouns first, then the id.
    """
    synsets = [synset for synset in synsets if not synset.is_instance]
    used: Counter[str] = Counter()
    for synset in synsets:
        for text in [synset.gloss, *synset.examples]:
            words = re.findall(r"[a-z]+(?:[-'][a-z]+)*", text.lower())
            used.update(words)
            used.update(f"{a} {b}" for a, b in pairwise(words))

    def credit(word: str) -> int:
        return used[word] + used[word + "s"] + used[word + "es"] + COMMON_WORD * (word in vocabulary)

    def rank(synset: Synset) -> tuple[int, int, str]:
        # words of one or two letters are mostly symbols ("as" is arsenic), and their counts belong to other words
        credits = [credit(word) for word in synset.first_sense_of if len(word) > 2]
        return -(synset.tagged + max(credits, default=0)), POS.index(synset.pos), synset.id

    return sorted(sorted(synsets, key=rank)[:N_RECORDS], key=lambda synset: synset.id)


def choose_queries(records: list[Synset]) -> list[Query]:
    """Return single words that are first lemma of a record; all records with the word among their lemmas are right.

    Words are split by a hash. A training word that shares a right record with a held-out word is dropped, so that no
    right record of a held-out word is seen in training.
    """
    answers: dict[str, list[int]] = {}
    for i, record in enumerate(records):
        for lemma in dict.fromkeys(record.lemmas):
            answers.setdefault(lemma, []).append(i)
    words = {record.lemmas[0] for record in records if " " not in record.lemmas[0]}
    shuffled = sorted(words, key=lambda word: hashlib.sha256(word.encode()).digest())
    held_out = shuffled[:N_HELD_OUT]
    seen = {i for word in held_out for i in answers[word]}
    train = [word for word in shuffled[N_HELD_OUT:] if seen.isdisjoint(answers[word])][:N_TRAIN]
    if len(train) < N_TRAIN:
        raise SystemExit(f"{len(train)} training words remain; expected {N_TRAIN}; hold out fewer words")
    chosen = set(held_out)
    return [Query(word, answers[word], word in chosen) for word in sorted(held_out + train)]


def principal_directions(
    keys: Tensor,  # (n, 384)
) -> Tensor:  # (384, WIDTH)
    """Return the first principal directions of the glosses; they apply to a vector without subtracting the mean."""
    _, _, directions = torch.linalg.svd(keys - keys.mean(0), full_matrices=False)
    directions = directions[:WIDTH]
    # the sign of a direction is arbitrary: fix it, so that two runs agree
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    signed: Tensor = directions * largest.sign()
    return signed.T.contiguous()


def unit(
    rows: Tensor,  # (n, d)
) -> Tensor:  # (n, d)
    """Scale each row to length 1."""
    return torch.nn.functional.normalize(rows, dim=1)


def quantise(
    rows: Tensor,  # (n, d)
    scale: Tensor,  # (d,)
) -> NDArray[np.int8]:  # (n, d)
    """Round to whole steps of `scale`."""
    return np.asarray((rows / scale).round().clamp(-127, 127).to(torch.int8))


def recall(
    queries: Tensor,  # (m, d)
    keys: Tensor,  # (n, d)
    right: list[list[int]],  # m lists
) -> str:
    """Return the percentages of queries with a right record in first place and in the first ten, as text."""
    at_1 = at_10 = 0
    for start in range(0, len(queries), 1000):
        top = (queries[start : start + 1000] @ keys.T).topk(10, dim=1).indices.tolist()
        for hits, rows in zip(top, right[start : start + 1000], strict=True):
            at_1 += hits[0] in rows
            at_10 += not set(hits).isdisjoint(rows)
    return f"recall@1 {100 * at_1 / len(right):5.2f}  recall@10 {100 * at_10 / len(right):5.2f}"


def train(
    queries: Tensor,  # (m, d)
    keys: Tensor,  # (n, d)
    right: list[list[int]],
    epochs: int = 4,
    batch: int = 256,
    rate: float = 1e-3,
    temperature: float = 0.05,
) -> Tensor:  # (d, d)
    """Learn a linear map of the query: loss = logsumexp over all records minus logsumexp over the right ones."""
    torch.manual_seed(0)
    learned = torch.eye(keys.shape[1], requires_grad=True)
    optimizer = torch.optim.Adam([learned], lr=rate)
    for _ in range(epochs):
        order = torch.randperm(len(queries))
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            scores = queries[rows] @ learned @ keys.T / temperature
            wrong = torch.ones_like(scores, dtype=torch.bool)
            for i, row in enumerate(rows.tolist()):
                wrong[i, right[row]] = False
            loss = (scores.logsumexp(1) - scores.masked_fill(wrong, -torch.inf).logsumexp(1)).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return learned.detach()


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write compressed JSON Lines; the same content gives the same bytes."""
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))  # mtime=0: no time in the file


def write_texts(out: Path, records: list[Synset], queries: list[Query], shown: tuple[list[bool], list[bool]]) -> None:
    """Write the records and the queries in the order of their keys; answers are ids of records."""
    write_lines(
        out / "records.jsonl.gz",
        [
            {"id": r.id, "lemmas": r.lemmas, "pos": r.pos, "gloss": r.gloss}
            for r, keep in zip(records, shown[0], strict=True)
            if keep
        ],
    )
    write_lines(
        out / "queries.jsonl.gz",
        [
            {"word": q.word, "held_out": q.held_out, "answers": [records[i].id for i in q.answers]}
            for q, keep in zip(queries, shown[1], strict=True)
            if keep
        ],
    )


def inoffensive(records: list[Synset], queries: list[Query]) -> tuple[list[bool], list[bool]]:
    """Return True for each record that is not offensive, and for each query whose answers are all not offensive."""
    allowed = [not OFFENSIVE.match(record.gloss) for record in records]
    return allowed, [all(allowed[i] for i in query.answers) for query in queries]


def write_licence(dictionary: Path, path: Path) -> None:
    """Write WordNet's licence, whose numbered lines are at the head of every WordNet file."""
    lines = (dictionary / "data.noun").read_text("ascii").splitlines()
    licence = [re.sub(r"^  \d+ ", "", line).rstrip() for line in lines if line.startswith("  ")]
    path.write_text("\n".join(licence) + "\n", "ascii")


def measure(
    full: tuple[Tensor, Tensor],  # (m, 384), (n, 384)
    reduced: tuple[Tensor, Tensor],  # (m, d), (n, d)
    stored: tuple[Tensor, Tensor],  # (m, d), (n, d)
    queries: list[Query],
) -> None:
    """Print recall on the held-out words by width and rounding of the vectors, before and after training."""
    held_out = torch.tensor([query.held_out for query in queries])
    right = [query.answers for query in queries if query.held_out]
    right_train = [query.answers for query in queries if not query.held_out]
    for name, (q, k) in (("384 float32", full), (f"{WIDTH} float32", reduced), (f"{WIDTH} int8", stored)):
        print(f"untrained, {name:11}  {recall(q[held_out], k, right)}")
        start = time.perf_counter()
        learned = train(q[~held_out], k, right_train)
        seconds = time.perf_counter() - start
        print(f"trained,   {name:11}  {recall(q[held_out] @ learned, k, right)}  in {seconds:.1f} s")


def main() -> None:
    """Read WordNet, embed the texts, write the files and measure recall."""
    parser = argparse.ArgumentParser(description="Make the data of `softdb demo`.")
    parser.add_argument("--dict", type=Path, required=True, help="folder of WordNet 3.0's data.*, index.*, cntlist.rev")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="name or folder")
    default = Path(__file__).resolve().parents[1] / "softdb" / "data" / "wordnet"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from sentence_transformers import SentenceTransformer  # slow to import, and --help does not need it

    encoder = SentenceTransformer(arguments.model, device="cpu")

    def encode(texts: list[str]) -> Tensor:
        return torch.from_numpy(np.asarray(encoder.encode(texts, batch_size=128, normalize_embeddings=True)))

    records = choose_records(read_synsets(arguments.dict), set(encoder.tokenizer.get_vocab()))
    queries = choose_queries(records)
    full = encode([query.word for query in queries]), encode([record.gloss for record in records])
    projection = principal_directions(full[1])
    reduced = unit(full[0] @ projection), unit(full[1] @ projection)
    scale = torch.cat(reduced).abs().amax(0) / 127
    rounded = quantise(reduced[0], scale), quantise(reduced[1], scale)

    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    shown = inoffensive(records, queries)
    arrays = {
        "queries": rounded[0][shown[1]],
        "keys": rounded[1][shown[0]],
        "scale": scale.numpy(),
        "projection": projection.numpy(),
    }
    for name, array in arrays.items():
        np.save(out / f"{name}.npy", array)
    write_texts(out, records, queries, shown)
    write_licence(arguments.dict, out / "LICENSE-WordNet.txt")
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:9,} {path.name}")
    stored = unit(torch.from_numpy(rounded[0]) * scale), unit(torch.from_numpy(rounded[1]) * scale)
    measure(full, reduced, stored, queries)


if __name__ == "__main__":
    main()
