"""A language model with a memory: its probabilities are those of the equations, and `generate` goes by them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import softdb
from softdb.errors import BadInput, Closed
from softdb.integrations.transformers import KNNLanguageModel
from softdb.integrations.transformers import language_model as under_test
from softdb.integrations.transformers.hidden import SAMPLE, records_of, windows_of
from softdb.integrations.transformers.language_model import Mixture

V, D, CONTEXT = 24, 16, 12
WORDS = ["<pad>", "<s>", *(f"w{i}" for i in range(V - 2))]


def gpt2(**words: Any) -> Any:
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    sizes = {"vocab_size": V, "n_positions": CONTEXT, "n_embd": D, "n_layer": 2, "n_head": 2, **special, **words}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    model.lm_head.weight.data.mul_(20)  # so that what it says differs from place to place
    return model.eval()


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=V, num_key_value_heads=2, max_position_embeddings=CONTEXT, **sizes, **special)
    return LlamaForCausalLM(config).eval()


def texts_of(count: int, seed: int = 0, longest: int = 2 * CONTEXT + 5) -> list[list[int]]:
    """Walks in which one of two tokens follows each token."""
    draws = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        text = [int(torch.randint(2, V, (), generator=draws))]
        for _ in range(int(torch.randint(longest, (), generator=draws))):
            text.append(2 + (3 * text[-1] + int(torch.randint(2, (), generator=draws))) % (V - 2))
        found.append(text)
    return found


@pytest.fixture(params=[gpt2, llama])
def lm(request: Any) -> Iterator[KNNLanguageModel]:
    with KNNLanguageModel.from_corpus(request.param(), texts_of(30), dtype="float32") as found:
        yield found


@pytest.fixture
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<s>", bos_token="<s>")


# -- the equations, in loops over every record -------------------------------------------------------------------------


def of_equations(lm: KNNLanguageModel, hidden: Tensor, logits: Tensor) -> Tensor:  # (…, d), (…, v) -> (…, v)
    """Over every record, or the k nearest."""
    records = lm.db.get(list(range(len(lm.db))))
    keys, labels = torch.as_tensor(records.keys).double(), torch.as_tensor(records.values).long()
    share = torch.sigmoid(lm.mixture.bias.double())
    flat, found = hidden.reshape(-1, hidden.shape[-1]).double(), []
    for one, own in zip(flat, logits.reshape(len(flat), -1).double(), strict=True):
        squares = (keys - one).square().sum(1)
        beyond = torch.zeros_like(squares, dtype=torch.bool)
        if lm.k is not None:
            beyond[squares.argsort()[lm.k :]] = True
        weights = (-squares / lm.mixture.temperature).masked_fill(beyond, -torch.inf).softmax(0)
        memory = torch.zeros(V, dtype=torch.float64).index_add(0, labels, weights)
        found.append((share * memory + (1 - share) * own.softmax(0)).log())
    return torch.stack(found).reshape(logits.shape)


def test_a_record_for_every_token_but_a_texts_first(lm: KNNLanguageModel) -> None:
    texts = texts_of(30)
    assert any(len(text) > 2 * CONTEXT for text in texts)  # windows
    labels = [token for text in texts for token in text[1:]]
    assert torch.as_tensor(lm.db.get(list(range(len(labels)))).values).tolist() == labels
    short = next(i for i, text in enumerate(texts) if CONTEXT // 2 < len(text) <= CONTEXT)
    start = sum(len(text) - 1 for text in texts[:short])
    keys = torch.as_tensor(lm.db.get(list(range(start, start + len(texts[short]) - 1))).keys)
    with torch.no_grad():
        body = lm.model.transformer if hasattr(lm.model, "transformer") else lm.model.model
        true = body(torch.tensor([texts[short]])).last_hidden_state[0, :-1]
    torch.testing.assert_close(keys, true, rtol=1e-4, atol=1e-5)


def test_windows_overlap_by_half() -> None:
    text = list(range(3 * CONTEXT + 1))
    actual = windows_of([text, [5], text[:2]], CONTEXT)
    assert [token for one in actual for token in one.tokens[one.first :]] == [*text[1:], 1]
    assert max(len(one.tokens) for one in actual) == CONTEXT
    assert [one.first for one in actual] == [1, *[CONTEXT // 2] * (len(actual) - 2), 1]


def test_the_first_temperature_is_that_of_the_eighth_neighbour(lm: KNNLanguageModel) -> None:
    keys = torch.as_tensor(lm.db.get(list(range(len(lm.db)))).keys).double()
    some = torch.linspace(0, len(keys) - 1, min(SAMPLE, len(keys))).long()
    nearest = torch.cdist(keys[some], keys).square().sort(dim=1).values[:, 8]  # the record itself comes first
    assert lm.mixture.temperature == pytest.approx(float(nearest.median()), rel=1e-3)


def test_a_tolerance_reaches_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    with KNNLanguageModel.from_corpus(gpt2(), texts_of(5), rtol=0.2) as lm:
        asked: list[Any] = []
        plain = lm.db.attend

        def attend(*given: Any, **how: Any) -> Any:
            asked.append(how["rtol"])
            return plain(*given, **how)

        monkeypatch.setattr(lm.db, "attend", attend)
        lm.perplexity(texts_of(2))
        assert set(asked) == {0.2}


def test_a_gate_sees_the_state_and_how_near_the_memory_is() -> None:
    mixture, hidden, lse = Mixture(D, 10.0, 0.3, True), torch.randn(40, D) * 5 + 3, torch.randn(40) - 90
    assert mixture.gate is not None
    torch.nn.init.normal_(mixture.gate.weight)
    mixture.standardise(hidden, lse)
    known = torch.cat([hidden, lse[:, None]], 1).double()
    seen = (known - known.mean(0)) / known.std(0)
    expected = math.log(0.3 / 0.7) + seen @ mixture.gate.weight[0].double()
    torch.testing.assert_close(mixture.logits(hidden, lse)[:, 0].double(), expected, rtol=1e-3, atol=1e-3)


def test_probabilities_are_those_of_the_equations(lm: KNNLanguageModel) -> None:
    hidden, logits = torch.randn(7, D), torch.randn(7, V)
    nearest = KNNLanguageModel(lm.model, lm.db, k=5)
    torch.testing.assert_close(
        nearest.log_probs(hidden, logits).double(), of_equations(nearest, hidden, logits), rtol=1e-4, atol=1e-5
    )
    actual = lm.log_probs(hidden, logits)
    torch.testing.assert_close(actual.double(), of_equations(lm, hidden, logits), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual.logsumexp(1), torch.zeros(7), rtol=0, atol=1e-5)
    torch.testing.assert_close(lm.log_probs(hidden).exp().sum(1), torch.ones(7))


def test_perplexity_is_that_of_every_token_in_its_window(lm: KNNLanguageModel) -> None:
    texts = [*texts_of(4, 1, CONTEXT - 1), [5]]
    total, count = [0.0, 0.0], 0
    for text in texts[:-1]:
        with torch.no_grad():
            out = lm.model(torch.tensor([text]), output_hidden_states=True)
        both = (of_equations(lm, out.hidden_states[-1][0], out.logits[0]), out.logits[0].log_softmax(1))
        for i, token in enumerate(text[1:]):
            total = [mine - float(logs[i, token]) for mine, logs in zip(total, both, strict=True)]
        count += len(text) - 1
    assert lm.perplexity(texts) == pytest.approx(math.exp(total[0] / count), rel=1e-4)
    assert lm.perplexity(texts, memory=False, batch_size=3) == pytest.approx(math.exp(total[1] / count), rel=1e-4)


@pytest.mark.parametrize("how", [{}, {"k": 40}, {"rtol": 0.2}])
@pytest.mark.parametrize("gate", [False, True])
def test_training_lowers_perplexity_on_other_texts(how: dict[str, Any], gate: bool) -> None:
    with KNNLanguageModel.from_corpus(gpt2(), texts_of(60), gate=gate, temperature=50.0, **how) as lm:
        alone, before = (lm.perplexity(texts_of(10, 2), memory=on) for on in (False, True))
        said: list[tuple[int, int]] = []
        curve = lm.fit(texts_of(20, 1), epochs=4, lr=0.2, progress=lambda _, *one: said.append(one))
        assert curve[-1] < curve[0] < alone
        assert said[-1][0] == said[-1][1] == len(said)
        assert lm.mixture.temperature < 40
        assert lm.perplexity(texts_of(10, 2)) < 0.8 * before < before < alone
        assert gate == bool(lm.mixture.gate is not None and lm.mixture.gate.weight.abs().sum() > 0)


def test_the_gradients_are_those_of_the_equations(lm: KNNLanguageModel) -> None:
    hidden, logits, labels = torch.randn(9, D), torch.randn(9, V), torch.randint(2, V, (9,))
    mixture = lm.mixture.requires_grad_(True)
    own = logits.log_softmax(1).gather(1, labels[:, None])
    loss = lm._loss(mixture, hidden, own, labels, torch.Generator())
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in mixture.parameters():  # the bandwidth, and λ
        step, sides = 1e-2, []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step)
                sides.append(-of_equations(lm, hidden, logits).gather(1, labels[:, None]).mean())
                parameter.sub_(sign * step)
        assert parameter.grad is not None
        slope = float(sides[0] - sides[1]) / (2 * step)
        assert float(parameter.grad) == pytest.approx(slope, rel=2e-2, abs=1e-4)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_cache": False},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"repetition_penalty": 1.3, "min_new_tokens": 4},
    ],
    ids=str,
)
def test_generate_goes_by_the_mixture(lm: KNNLanguageModel, how: dict[str, Any]) -> None:
    """A model whose own head gives the mixture, with rows padded left."""
    prompts = [[0, 0, 0, 5], [0, 4, 8, 2], [3, 7, 11, 20]]
    asked: dict[str, Any] = {"input_ids": torch.tensor(prompts), "attention_mask": torch.tensor(prompts).ne(0).long()}
    words = {**asked, "max_new_tokens": 7, "pad_token_id": 0, **how}
    penalised = "repetition_penalty" in how
    lm.mixture.bias.add_(2)
    torch.manual_seed(3)
    actual = lm.generate(**words)
    plain = lm.model.generate(**words)
    if not penalised:  # an earlier processor changes the mixed probabilities
        hook = lm.head.register_forward_hook(lambda _, given, out: of_equations(lm, given[0], out).float())
        torch.manual_seed(3)
        assert torch.equal(actual, lm.model.generate(**words))
        hook.remove()
    assert not torch.equal(actual, plain)
    if not how:
        lists = [[5], [4, 8, 2], [3, 7, 11, 20]]
        assert torch.equal(lm.generate(lists, max_new_tokens=7, pad_token_id=0), actual)
        for row, prompt in zip(actual, lists, strict=True):
            single = lm.generate(torch.tensor([prompt]), max_new_tokens=7, pad_token_id=0)[0, len(prompt) :]
            assert torch.equal(row[4:][: len(single)], single)


def test_a_forbidden_token_stays_forbidden(lm: KNNLanguageModel) -> None:
    first = int(lm.generate(torch.tensor([[5]]), max_new_tokens=1, pad_token_id=0)[0, -1])
    banned = NoBadWordsLogitsProcessor([[first]], eos_token_id=1)
    actual = lm.generate(torch.tensor([[5]]), max_new_tokens=6, pad_token_id=0, logits_processor=[banned])
    assert first not in actual[0, 1:].tolist()


def test_the_language_model_takes_and_returns_texts(tokenizer: Any) -> None:
    texts = [tokenizer.decode(one) for one in texts_of(20)]
    with KNNLanguageModel.from_corpus(gpt2(), texts, tokenizer=tokenizer) as lm:
        actual = lm.generate(["w3 w4", "w5"], max_new_tokens=3)
        assert [one.split()[: len(asked)] for one, asked in zip(actual, (["w3", "w4"], ["w5"]), strict=True)] == [
            ["w3", "w4"],
            ["w5"],
        ]
        assert lm.generate("w5", max_new_tokens=3) == actual[1]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <s>", None, [("<s>", 1)])
        assert lm.generate("w5", max_new_tokens=3) == actual[1]  # the end after a text is not the prompt's
        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
        assert lm.perplexity(texts) < lm.perplexity(texts, memory=False)
        start = texts[0].split()
        assert lm.db.search([" ".join(start[:4])], 1).ids == [[3]]  # the context that came before the fifth token


# -- the database ------------------------------------------------------------------------------------------------------


def test_an_interrupted_corpus_resumes_where_it_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softdb.integrations.transformers.hidden.COMMIT", 50)
    texts, model, seen = texts_of(30), gpt2(), 0
    plain = records_of

    def counting(*given: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 4:
            raise KeyboardInterrupt
        return plain(*given)

    monkeypatch.setattr(under_test, "records_of", counting)
    with pytest.raises(KeyboardInterrupt):
        KNNLanguageModel.from_corpus(model, texts, path)
    with softdb.open(path, mode="r") as db:
        first = len(db)
    assert 0 < first < sum(len(text) - 1 for text in texts)
    with KNNLanguageModel.from_corpus(model, texts, path) as lm, KNNLanguageModel.from_corpus(model, texts) as whole:
        ids = list(range(sum(len(text) - 1 for text in texts)))
        assert len(lm.db) == len(ids)
        ours, theirs = lm.db.get(ids), whole.db.get(ids)
        torch.testing.assert_close(torch.as_tensor(ours.keys), torch.as_tensor(theirs.keys))
        actual = lm.perplexity(texts_of(3, 1))
    done = seen
    with KNNLanguageModel.from_corpus(model, texts, path) as lm:  # nothing is left to do
        assert lm.perplexity(texts_of(3, 1)) == actual
    assert seen == done
    with pytest.raises(BadInput, match="the database was begun with other texts"):
        KNNLanguageModel.from_corpus(model, [texts[0][::-1], *texts[1:]], path)
    with pytest.raises(BadInput, match=f"begun with other texts: {len(ids)} records"):
        KNNLanguageModel.from_corpus(model, [*texts, *texts_of(30, 5)], path)
    with pytest.raises(BadInput, match="records but these texts make"):
        KNNLanguageModel.from_corpus(model, texts[:3], path)
    with softdb.open(path, mode="r") as db, KNNLanguageModel(model, db) as lm:
        assert lm.perplexity(texts_of(3, 1)) == actual
    trained = gpt2()
    trained.transformer.h[0].mlp.c_fc.bias.data.add_(1)
    for other in (gpt2(n_layer=1), trained):
        with softdb.open(path, mode="r") as db, pytest.raises(BadInput, match="give the model that made them"):
            KNNLanguageModel(other, db)


def test_close_leaves_the_model_unchanged() -> None:
    model = gpt2()
    asked = {"inputs": torch.tensor([[5]]), "max_new_tokens": 4, "pad_token_id": 0}
    before = model.generate(**asked)
    lm = KNNLanguageModel.from_corpus(model, texts_of(5))
    lm.close()
    assert torch.equal(before, model.generate(**asked))
    assert not model.get_output_embeddings()._forward_pre_hooks
    with pytest.raises(BadInput, match="the hidden states of the last forward pass are none"):
        lm.generate(**asked)
    with pytest.raises(Closed, match="closed"):
        lm.perplexity(texts_of(2))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_models_without_a_head_are_refused() -> None:
    small = {"vocab_size": V, "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
    sizes = {"vocab_size": V, "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    for model, message in (
        (GPT2Model(gpt2().config), "GPT2Model has no output head that predicts the next token"),
        (BertForMaskedLM(BertConfig(**small)), "BertForMaskedLM has no output head that predicts the next token"),
        (T5ForConditionalGeneration(T5Config(**sizes)), "has an encoder and a decoder; give a causal model"),
        (torch.nn.Linear(2, 2), "Linear has no output head"),
    ):
        with pytest.raises(BadInput, match=message):
            KNNLanguageModel.from_corpus(model, texts_of(3))


def test_databases_that_do_not_fit_are_refused() -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"dim": D + 1, "num_classes": V}, f"hidden states are {D} wide but the keys {D + 1}"),
        ({"dim": D, "num_classes": V - 1}, f"the model has {V} tokens but num_classes of the database is {V - 1}"),
        ({"dim": D}, "num_classes of the database is None"),
        ({"dim": D, "num_classes": V}, "holds no records"),
    ]
    for words, message in settings:
        with softdb.open(None, **words) as db, pytest.raises(BadInput, match=message):
            KNNLanguageModel(gpt2(), db)
    wrong: Any = "memory"
    with pytest.raises(BadInput, match="db is 'memory'; expected an open softdb database"):
        KNNLanguageModel(gpt2(), wrong)
    db = softdb.open(None, dim=D, num_classes=V)
    db.close()
    with pytest.raises(Closed, match="closed"):
        KNNLanguageModel(gpt2(), db)


def test_texts_that_make_no_sense_are_refused(tokenizer: Any) -> None:
    for texts, words, message in (
        ([], {}, "the corpus of 0 texts has no token that follows another"),
        ([[3], []], {}, "the corpus of 2 texts has no token"),
        ("w1 w2", {"tokenizer": tokenizer}, "texts are 'w1 w2'; expected a list of texts"),
        (["w1 w2"], {}, "no tokenizer is given"),
        ([[1, 2], "w1"], {"tokenizer": tokenizer}, "some are lists of token ids"),
        ([[1, 2], [3, V]], {}, f"text 1 has the token {V}; expected whole numbers from 0 to {V - 1}"),
        ([[1, 2.5]], {}, "text 0 has the token"),
        ([[1, -1]], {}, "text 0 has the token -1"),
        (texts_of(3), {"interpolation": 1.0}, "interpolation is 1; expected"),
        (texts_of(3), {"k": 3, "rtol": 0.1}, "k and a tolerance are both given"),
        (texts_of(3), {"temperature": 0}, "temperature is 0"),
    ):
        given: Any = texts
        with pytest.raises(BadInput, match=message):
            KNNLanguageModel.from_corpus(gpt2(), given, **words)
    tokenizer.add_tokens(["more", "words"])
    with pytest.raises(BadInput, match=f"the tokenizer has {V + 2} tokens but the head of GPT2LMHeadModel {V}"):
        KNNLanguageModel.from_corpus(gpt2(), ["w1 w2"], tokenizer=tokenizer)
    with KNNLanguageModel.from_corpus(gpt2(), texts_of(3)) as lm:
        with pytest.raises(BadInput, match="the texts have no token that follows another"):
            lm.perplexity([[3]])
        with pytest.raises(BadInput, match="texts are given without a tokenizer"):
            lm.generate("w1")
        for wrong in (3, [3, 4], []):
            with pytest.raises(BadInput, match=r"expected a text, texts, or token ids \(q, t\)"):
                lm.generate(wrong)
        with pytest.raises(BadInput, match="no tokenizer is given"):
            lm.generate([[3], "w1"])
        with pytest.raises(BadInput, match="prompt_lookup_num_tokens is given, but a memory answers for one"):
            lm.generate(torch.tensor([[3]]), prompt_lookup_num_tokens=2)
        lm.perplexity(texts_of(3))
        with pytest.raises(BadInput, match="scores have 2 rows but the hidden states of the last forward pass are"):
            lm(torch.zeros(2, 3), torch.zeros(2, V))
        with pytest.raises(BadInput, match=r"lr is 1e\+30; expected at most 10"):
            lm.fit(texts_of(5, 1), lr=1e30)
        assert lm.mixture.temperature > 0


def test_the_example_prints_what_it_claims(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "language_model.py"
    root = example.parents[1]
    paths = {**os.environ, "PYTHONPATH": f"{root / 'tests' / 'checked'}:{root}"}  # checks the picture
    command = [sys.executable, "-W", "error", str(example), "400", "--quick", "--plot", "drawn.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=paths)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    lines = done.stdout.splitlines()
    without, mixed = (float(one.rstrip(",")) for one in lines[-2].split() if one[0].isdigit())
    assert mixed < 0.8 * without
    assert lines[-1].startswith("written with it: to")
