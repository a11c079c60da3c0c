"""Checkpointing, second derivatives, transforms of torch.func, autocast and copies: lines of docs/works-with.md."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from worlds.towers import CASES, D, N, alike, batch, gradients, opened, stored, tower

import softdb
from softdb.errors import BadInput
from softdb.nn import Attention, Memory, ProductKeys, View, retrieval_loss

# forward-mode derivatives load decompositions of torch that are scripted
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # of torch itself, in another category on 3.14

# -- checkpointing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_checkpointing_changes_no_gradient(case: str, reentrant: bool) -> None:
    model = tower(case)
    x, right = batch()
    expected = gradients(model, model(x, right).mean())
    recomputed: Tensor = checkpoint(model, x.requires_grad_(), right, use_reentrant=reentrant)
    alike(gradients(model, recomputed.mean()), expected)


def test_checkpointing_recomputes_a_kernel_pass() -> None:
    """With enough records a kernel answers, which has a backward pass of its own."""
    draws = torch.Generator().manual_seed(1)
    queries = torch.randn(64, 16, generator=draws, requires_grad=True)
    with softdb.open(None, dim=16) as db:
        db.insert(range(4096), torch.randn(4096, 16, generator=draws))
        slopes = []
        for ask in (db.attend, lambda q: checkpoint(db.attend, q, use_reentrant=False)):
            (slope,) = torch.autograd.grad(ask(queries).output.square().sum(), queries)
            slopes.append(slope)
    assert torch.equal(*slopes)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_same_records_again(reentrant: bool) -> None:
    """Draws of torch's default generator, which checkpoint rewinds, and of none; a generator of one's own goes on."""
    draws = torch.Generator().manual_seed(2)
    queries = torch.randn(3, 8, generator=draws)
    with softdb.open(None, dim=8) as db:
        db.insert(range(12_000), torch.randn(12_000, 8, generator=draws))
        db.build_index("ivf")

        def slope(recompute: bool, generator: torch.Generator | None) -> Tensor:
            def ask(q: Tensor) -> Tensor:
                return db.attend(q, rtol=0.01, max_draws=60, temperature=2.0, generator=generator).output

            torch.manual_seed(4)
            leaf = queries.clone().requires_grad_()
            output = checkpoint(ask, leaf, use_reentrant=reentrant) if recompute else ask(leaf)
            torch.manual_seed(9)  # as if other code had drawn in between
            output.square().sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        for generator in (None, torch.default_generator):
            torch.testing.assert_close(slope(True, generator), slope(False, generator))
        assert not torch.allclose(slope(False, torch.default_generator), slope(False, None), rtol=1e-3)
        own = torch.Generator()
        assert not torch.allclose(slope(True, own.manual_seed(4)), slope(False, own.manual_seed(4)), rtol=1e-3)


# -- second derivatives ------------------------------------------------------------------------------------------------


def weighted(queries: Tensor, keys: Tensor, values: Tensor, temperature: float = 1.0) -> Tensor:
    """The soft query over all keys, in plain torch."""
    return torch.softmax(queries @ keys.mT / temperature, -1) @ values


def penalty(ask: Callable[[Tensor], Tensor], queries: Tensor) -> Tensor:
    """‖∂ Σ o² / ∂ q‖², a gradient penalty."""
    (slope,) = torch.autograd.grad(ask(queries).square().sum(), queries, create_graph=True)
    return slope.square().sum()


def asked(db: softdb.SoftDB, dtype: torch.dtype) -> dict[str, tuple[Callable[[Tensor], Tensor], Any]]:
    """Soft queries over all N records by row of the page, with what trains in them; all equal `weighted`."""
    keys, values = (column.to(dtype) for column in stored())
    memory = Memory(db, k=N).to(dtype)
    identity = torch.nn.Linear(D, D, bias=False).to(dtype)
    torch.nn.init.eye_(identity.weight)
    view = View(db, identity)
    return {
        "softdb.attention": (lambda q: softdb.attention(q, keys, values, score=softdb.scores.Dot()), None),
        "nn.Memory": (lambda q: memory(q).output, memory),
        "nn.View, every record": (lambda q: view.attend(q).output, view),
        "nn.View, k": (lambda q: view.attend(q, k=N).output, view),
        "db.attend, k": (lambda q: db.attend(q, k=N).output, None),
        "db.attend, need_weights": (lambda q: db.attend(q, need_weights=True).output, None),
    }


@pytest.mark.parametrize("case", asked(opened(None), torch.float64))
def test_second_derivatives_are_those_of_plain_torch(case: str) -> None:
    ask, module = asked(opened(None), torch.float64)[case]
    queries = batch()[0].double()
    actual, expected = (queries.clone().requires_grad_() for _ in range(2))
    penalty(ask, actual).backward()  # type: ignore[no-untyped-call]
    keys, values = (column.double().requires_grad_() for column in stored())
    plain = penalty(lambda q: weighted(q, keys, values), expected)
    plain.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-9, atol=1e-9)
    if isinstance(module, Memory):
        for trained, leaf in ((module.keys, keys), (module.values, values)):
            assert trained is not None
            assert trained.grad is not None
            assert trained.grad.is_sparse
            torch.testing.assert_close(trained.grad.to_dense(), leaf.grad, rtol=1e-9, atol=1e-9)
    elif module is not None:
        assert keys.grad is not None
        own = sum(torch.outer(slope, key) for slope, key in zip(keys.grad, keys.detach(), strict=True))
        torch.testing.assert_close(module.encoder.weight.grad, own, rtol=1e-9, atol=1e-9)


def test_gradients_of_a_memory_can_be_differentiated() -> None:
    """A step of training inside a larger loss: the gradients of the parameters themselves have a graph."""
    memory = Memory(opened(None), k=N).double()
    queries = batch()[0].double()
    slopes = torch.autograd.grad(memory(queries).output.square().sum(), list(memory.parameters()), create_graph=True)
    sum(slope.to_dense().square().sum() for slope in slopes).backward()  # type: ignore[union-attr]
    keys, values = leaves = [column.double().requires_grad_() for column in stored()]
    plain = torch.autograd.grad(weighted(queries, keys, values).square().sum(), leaves, create_graph=True)
    sum(slope.square().sum() for slope in plain).backward()  # type: ignore[union-attr]
    for parameter, leaf in zip(memory.parameters(), leaves, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.to_dense(), leaf.grad, rtol=1e-9, atol=1e-9)


def test_product_keys_have_second_derivatives() -> None:
    memory = ProductKeys(6, 4, 3, k=3).double()
    inputs = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(memory, (inputs,))


@pytest.mark.parametrize("options", [{}, {"rtol": 0.1}])
def test_a_pass_over_every_record_refuses_second_derivatives(options: dict[str, Any]) -> None:
    db, x = opened(None), batch()[0].requires_grad_()
    layer = Attention(db, D, 2, batch_first=True)
    asks: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda q: db.attend(q, **options).output,
        lambda q: layer(q[None], **options)[0],
        lambda q: retrieval_loss(db, q, list(range(len(q))), **options),
    )
    for ask in asks:
        with pytest.raises(BadInput, match="no second derivative; ask a database for the k nearest"):
            penalty(ask, x).backward()  # type: ignore[no-untyped-call]


# -- torch.func --------------------------------------------------------------------------------------------------------


def test_plain_tensors_pass_through_torch_func() -> None:
    keys, values = stored()
    query, tangent = batch()[0], torch.randn(8, D)

    def ask(q: Tensor) -> Tensor:
        return softdb.attention(q, keys, values)

    def scaled(q: Tensor) -> Tensor:
        return weighted(q, keys, values, D**0.5)

    layer = Attention(None, D, 2, batch_first=True)
    for own, plain in ((ask, scaled), (lambda x: layer(x[None], x[None], x[None])[0][0], None)):
        leaf = query.clone().requires_grad_()
        (expected,) = torch.autograd.grad((plain or own)(leaf).square().sum(), leaf)
        slope = torch.func.grad(lambda q, own=own: own(q).square().sum())(query)
        torch.testing.assert_close(slope, expected)
    torch.testing.assert_close(torch.func.jvp(ask, (query,), (tangent,)), torch.func.jvp(scaled, (query,), (tangent,)))
    torch.testing.assert_close(torch.func.vmap(lambda q: ask(q[None])[0])(query), scaled(query))
    torch.testing.assert_close(
        torch.func.hessian(lambda q: ask(q).sum())(query), torch.func.hessian(lambda q: scaled(q).sum())(query)
    )
    parameters: dict[str, Tensor] = dict(layer.named_parameters())
    batches = query.view(4, 2, D)
    each = torch.func.vmap(lambda x: torch.func.functional_call(layer, parameters, (x, x, x))[0])(batches)
    torch.testing.assert_close(each, layer(batches, batches, batches)[0])


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda ask, x: torch.func.grad(lambda q: ask(q).sum())(x),
    "vmap": lambda ask, x: torch.func.vmap(lambda q: ask(q[None]))(x),
    "jvp": lambda ask, x: torch.func.jvp(ask, (x,), (x,)),
}
REFUSED = (
    r"cannot run here inside torch\.func\.grad, vmap or jvp; use torch\.autograd\.grad or backward\(\)|"
    r"queries carry tangents of forward mode \(jvp\), which no database follows; use torch\.autograd\.grad"
)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "softdb.attention"])
def test_a_database_refuses_torch_func_and_names_the_way_round(case: str, transform: str) -> None:
    model, x = tower(case), batch()[0]
    with pytest.raises(BadInput, match=REFUSED):
        TRANSFORMS[transform](lambda q: model(q, torch.arange(len(q))), x)
    torch.testing.assert_close(model(x, torch.arange(8)).shape, (8,))  # outside it answers as before


@pytest.mark.parametrize("options", [{}, {"k": N}, {"rtol": 0.1}, {"need_weights": True}])
def test_forward_mode_is_refused(options: dict[str, Any]) -> None:
    """Without the refusal the tangent would be lost, without a word."""
    db, x = opened(None), batch()[0]
    memory = Memory(db, k=5)
    with forward_ad.dual_level():
        twin = forward_ad.make_dual(x, x)  # type: ignore[no-untyped-call]
        for ask in (lambda: db.attend(twin, **options), lambda: memory(twin)):
            with pytest.raises(BadInput, match=REFUSED):
                ask()  # type: ignore[no-untyped-call]


def test_an_error_of_torch_outside_of_transforms_stays_as_it_is() -> None:
    def broken(query: Tensor, key: Tensor) -> Tensor:
        raise RuntimeError("a score of one's own fails")

    with pytest.raises(RuntimeError, match="a score of one's own fails"):
        softdb.attention(*(torch.ones(2, 2),) * 3, score=broken)
    with pytest.raises(RuntimeError, match="a score of one's own fails"):
        opened(None).attend(batch()[0], score=broken)


@pytest.mark.parametrize("case", CASES)
def test_functional_call_takes_other_parameters(case: str) -> None:
    model = tower(case)
    x, right = batch()
    others = {name: (parameter * 1.1).detach() for name, parameter in model.named_parameters()}
    actual = torch.func.functional_call(model, others, (x, right))
    model.load_state_dict(others, strict=False) if "Memory" not in case else None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(others[name])
    torch.testing.assert_close(actual, model(x, right))


# -- autocast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_autocast_leaves_scores_and_pooling_in_float32(case: str) -> None:
    model = tower(case)
    x, right = batch()
    expected = gradients(model, model(x, right).mean())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, right)
    narrow = "attention" in case.lower()  # whose outputs have the dtype of their queries
    assert loss.dtype is (torch.bfloat16 if narrow else torch.float32)
    torch.testing.assert_close(loss.float(), model(x, right), rtol=0.05, atol=0.05)
    alike(gradients(model, loss.mean()), expected, 0.1)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_copies_and_pickles_answer_and_learn_alike(case: str, tmp_path: Path) -> None:
    x, right = batch()
    with opened(tmp_path / "db") as db:
        model = tower(case, db)
        loss = model(x, right)
        expected = gradients(model, loss.mean())
        model.db = []  # a handle of the test's own
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin.db = [db]
            again = twin(x, right)
            torch.testing.assert_close(again, loss)
            alike(gradients(twin, again.mean()), expected)
